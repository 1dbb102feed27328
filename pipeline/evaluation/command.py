"""`python -m pipeline.evaluation`: the paper's nine sets in one command."""

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeline.drawing.formatting import printable
from pipeline.evaluation.sets import NINE, SETS, require_known
from vocag_cli.options import Folder, Option, parse_options

MEASURES = ("accuracy", "text", "solution", "answer", "options")
DONE, CANNOT_RUN, STOPPED = 0, 2, 130

_GROUPS = {
    "tasks": "what is measured",
    "dtype": "how the student runs",
}

_EPILOG = f"""\
examples:
  vocag evaluate runs/teacher/model --output evaluated
      A student that vocag train left: all nine sets and measures, from math-evaluation-harness's
      files. Killed? The same command goes on, and asks nothing twice.
  vocag evaluate full=runs/full/model --output evaluated
      Another one beside it: evaluated/report.html has both.
  vocag evaluate checkpoints --data benchmarks --limit 20 --output evaluated
      A Megatron checkpoint, exported first; 20 items of each set, spread evenly, from local files.
  vocag evaluate model.gguf --measures solution text --output evaluated
      Bits per byte alone: what tells students below a billion parameters apart.
  vocag evaluate TinyLlama/TinyLlama_v1.1 --prompts math-evaluation-harness/prompts --output e
      The paper's prompts byte for byte, those of MathQA, MMLU-STEM and SAT included.

sets, --tasks: {", ".join(SETS)}
measures, --measures (docs/evaluation.md says what each is worth at which size):
  accuracy   greedy answers after worked examples, as math-evaluation-harness asks and judges
  solution   bits per byte of the worked solution, given the problem
  text       bits per byte of problem and solution
  answer     bits per byte of the bare answer, given the problem
  options    the right option's bits per byte, and choice by likelihood, with chance beside it

output: NAME/results.json, NAME/samples/ (what it said), NAME/answers-*.jsonl (to go on from), and
report.html over every student in the folder.

exit status: {DONE} done, {CANNOT_RUN} could not run."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Evaluate a student on the paper's nine sets, by the protocol that the paper's numbers have.

    Attributes:
        student: [NAME=] a Hugging Face folder or repository, a .gguf file, or a Megatron
            checkpoint, which is exported first.
        output: folder of the results; students that share one are compared in its report.
        tasks: sets (default: the nine; math_full is MATH's whole test set).
        measures: of each set, those that it allows (default: all).
        data: a folder of the sets' files, NAME.jsonl or NAME/test.jsonl (default:
            math-evaluation-harness's, downloaded once).
        prompts: the folder prompts of a clone of math-evaluation-harness, for its worked examples
            of the sets by letter (default: our own).
        limit: items of each set, spread evenly; 0 for all.
        max_answer_tokens: longest answer; the protocol's is 1024.
        dtype: of the weights; auto: as they are stored.
        device: such as cpu or cuda:1 (default: the GPU where there is one).
        batch_size: questions at a time; with more than one, 16-bit answers may differ in rare
            cases.
        tokenizer: folder or repository of the tokenizer, where it isn't the student's own.
    """

    student: Annotated[str, Option("STUDENT", form="positional")]
    output: Folder
    tasks: Annotated[tuple[str, ...], Option("SET")] = NINE
    measures: Annotated[tuple[str, ...], Option("MEASURE")] = MEASURES
    data: Annotated[str, Option("FOLDER")] = ""
    prompts: Annotated[Path, Option("FOLDER")] | None = None
    limit: int = 0
    max_answer_tokens: int = 1024
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Option("NAME")] = ""
    batch_size: int = 1
    tokenizer: Annotated[str, Option("TOKENIZER")] = ""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: with the option, its value and the remedy.
        """
        require_known("--tasks", self.tasks, tuple(SETS))
        require_known("--measures", self.measures, MEASURES)
        if self.limit < 0:
            raise ValueError(f"--limit {self.limit}: it must be 0 or more")
        for name in ("max_answer_tokens", "batch_size"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {getattr(self, name)}: it must be at least 1")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        options = parse_options(
            EvaluateOptions, argv, prog="vocag evaluate", epilog=_EPILOG, groups=_GROUPS
        )
        _quieten()
        for line in _evaluate(options):
            print(line, flush=True)
    except (ValueError, OSError) as error:
        print(f"vocag evaluate: {printable(str(error))}", file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        print(
            "vocag evaluate: stopped; the same command goes on, and asks nothing twice",
            file=sys.stderr,
        )
        return STOPPED
    return DONE


def _evaluate(options: EvaluateOptions) -> Iterator[str]:
    # After the options: help needs neither lm-eval nor torch.
    from pipeline.evaluation.differences import describe_differences, other_students
    from pipeline.evaluation.report import write_report
    from pipeline.evaluation.run import measure_all, open_results, plan
    from pipeline.evaluation.students import (
        Engine,
        answers_name,
        choose_device,
        find_student,
        open_model,
    )
    from pipeline.evaluation.summary import describe_measurement, describe_results

    output = Path(options.output)
    steps = plan(options.tasks, options.measures, options.data, options.limit)
    if not steps:
        asked = f"--tasks {' '.join(options.tasks)} --measures {' '.join(options.measures)}"
        raise ValueError(f"{asked}: none of these sets allows any of these measures")
    student = find_student(options.student, output)
    folder = output / student.name
    engine = Engine(
        dtype=options.dtype,
        device=options.device,
        batch_size=options.batch_size,
        tokenizer=options.tokenizer,
    )
    settings = asdict(engine) | {"device": choose_device(engine.device)}
    results = open_results(student, folder, settings)
    model = open_model(student, engine)
    made = measure_all(
        model,
        results,
        steps,
        folder=folder,
        answers=folder / answers_name(student, engine),
        settings=settings,
        data=options.data,
        prompts=str(options.prompts or ""),
        limit=options.limit,
        max_answer_tokens=options.max_answer_tokens,
    )
    for number, (name, measure, measurement) in enumerate(made, 1):
        yield f"{number}/{len(steps)} {describe_measurement(name, measure, measurement)}"
    yield ""
    yield from describe_results(results)
    for other in other_students(output, student.name):
        yield from describe_differences(folder, output / other)
    yield f"wrote {folder / 'results.json'} and {write_report(output)}"


def _quieten() -> None:
    """Keep lm-eval's remarks on its own settings from the terminal, and its bars from a log."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():  # read when tqdm is imported, which lm-eval and transformers do
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
