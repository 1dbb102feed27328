"""`vocag evaluate`: the paper's nine sets."""

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeline.command_line.failures import naming
from pipeline.command_line.folder_lock import hold_folder
from pipeline.command_line.option_parsing import (
    Folder,
    Option,
    naming_options,
    parse_options,
)
from pipeline.drawing.printing import prints
from pipeline.evaluation.sets import SETS
from pipeline.evaluation.settings import Asked, StudentEngine

OUTPUT_LOCK = ".evaluate-lock"
"""The lock's name in a student's results; it goes when they are measured."""

_GROUPS = {
    "tasks": "what is measured",
    "dtype": "how the student runs",
}

_EPILOG = f"""\
examples:
  vocag evaluate runs/teacher/model --output evaluated
      A student that vocag train left: all nine sets and measures, from math-evaluation-harness's
      files. Killed? Run the same command again to continue; nothing is asked twice.
  vocag evaluate full=runs/full/model --output evaluated
      Another student next to it: evaluated/report.html has both.
  vocag evaluate model.gguf --measures solution text --data benchmarks --limit 20 --output e
      Only bits per byte, which distinguish students below a billion parameters; 20 items of each
      set, spread evenly, from local files.

sets, --tasks: {", ".join(SETS)}
measures, --measures (docs/guides/evaluate.md says what each is worth at which size):
  accuracy   greedy answers after worked examples, as math-evaluation-harness asks and judges
  solution   bits per byte of the worked solution, given the problem
  text       bits per byte of problem and solution
  answer     bits per byte of the bare answer, given the problem
  options    the right option's bits per byte, and choice by likelihood, with chance next to it

output: NAME/results.json, NAME/samples/ (what it said), NAME/answers-*.jsonl (to continue from),
and report.html over every student in the folder.

exit status: 0 done, 2 could not run."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate a student on the paper's nine sets, by the protocol of the paper's numbers.

    Attributes:
        student: [NAME=] a Hugging Face folder or repository, or a .gguf file.
        output: folder of the results; students that share one are compared in its report.
        asked: what is measured.
        engine: how the student runs.
    """

    student: Annotated[str, Option("STUDENT", form="positional")]
    output: Folder
    asked: Asked
    engine: StudentEngine


@prints("vocag evaluate")
def main(argv: list[str] | None = None) -> Iterator[str]:
    """Run the command."""
    options = parse_options(
        EvaluateOptions, argv, prog="vocag evaluate", epilog=_EPILOG, groups=_GROUPS
    )
    _quieten()
    with naming_options(EvaluateOptions):
        yield from _evaluate(options)


def _evaluate(options: EvaluateOptions) -> Iterator[str]:
    # After the options: help needs neither lm-eval nor torch.
    from pipeline.evaluation.measuring import measure_all, open_results, plan
    from pipeline.evaluation.paired_differences import describe_differences
    from pipeline.evaluation.results import student_folders
    from pipeline.evaluation.results_page import write_report
    from pipeline.evaluation.results_table import describe_measurement, describe_results
    from pipeline.evaluation.students import (
        find_student,
        naming_too_little_memory,
        open_model,
        with_device,
    )

    output, asked = Path(options.output), options.asked
    student, engine = find_student(options.student), with_device(options.engine)
    steps = plan(asked)
    folder = output / student.name
    # Two at once would each write only their own results.
    with hold_folder(str(folder / OUTPUT_LOCK), str(output)), naming(str(output)):
        results = open_results(student, folder, engine)
        model = open_model(student, engine)
        made = measure_all(model, results, steps, asked=asked, engine=engine, folder=folder)
        with naming_too_little_memory(engine):
            for number, (name, measure, measurement) in enumerate(made, 1):
                yield f"{number}/{len(steps)} {describe_measurement(name, measure, measurement)}"
        yield ""
        yield from describe_results(results)
        for other in student_folders(output):
            if other != folder:
                yield from describe_differences(folder, other)
        yield f"wrote {folder / 'results.json'} and {write_report(output)}"


def _quieten() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():  # read when tqdm is imported, which lm-eval and transformers do
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
