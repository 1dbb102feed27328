"""`python -m pipeline.explore`: what is in a dataset, how it is aligned, how it would be packed."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeline.dataset.files import open_dataset
from pipeline.drawing.charts import require_drawable
from pipeline.drawing.formatting import printable
from pipeline.drawing.page_blocks import render_preview
from pipeline.drawing.terminal_blocks import LEGEND, draw_document
from pipeline.explore.info import describe_dataset, describe_groups, describe_plan
from pipeline.explore.mixture import describe_mixture, draw_mixture, plan_dataset, plan_mixture_rows
from pipeline.explore.preview import load_previews
from pipeline.packing.mixture_file import is_mixture
from pipeline.packing.opening import OpenedRun, open_run
from pipeline.packing.reading import Reading
from pipeline.packing.rules import PackingRules
from vocag_cli.options import (
    Condition,
    DatasetSource,
    Option,
    TokenName,
    parse_command,
)

_EPILOG = """\
examples:
  vocag explore info aligned
      Documents, tokens, lengths, tokenizers, dead letters, shards.
  vocag explore info aligned --by source
      Documents, tokens, unmapped share and IoU of each source (see align --metadata).
  vocag explore preview aligned
      The first documents, student tokens above, teacher tokens below.
  vocag explore preview aligned --id train/17 --html preview.html
      One document as a page for a browser.
  vocag explore plan gs://bucket/aligned --seq-length 2048 --global-batch-size 256 --replicas 16
      Rows, padding and steps per epoch, before anything is trained.
  vocag explore plan mixture.toml --seq-length 2048 --figure mixture.svg
      Tokens and epochs of each dataset in each stage of a mixture, with a picture.
  vocag explore plan aligned --seq-length 2048 --where "language == 'en' and score > 0.5"
      The same of some documents.
"""


@dataclass(frozen=True)
class InfoOptions:
    """Totals, lengths, tokenizers, dead letters, shards.

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        by: count documents, tokens, unmapped share and IoU by this field of the documents'
            metadata instead.
    """

    dataset: DatasetSource
    by: Annotated[str, Option("FIELD")] = ""

    def lines(self) -> Iterator[str]:
        """Yield what to print."""
        dataset = open_dataset(self.dataset)
        return describe_groups(dataset, self.by) if self.by else describe_dataset(dataset)


@dataclass(frozen=True)
class PreviewOptions:
    """Documents with both tokenizations.

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        documents: how many, from the first on.
        id: show the document of this id instead.
        max_tokens: student tokens shown of each.
        html: write a page to this file instead of drawing in the terminal.
        colour: auto: where the output is a terminal and NO_COLOR is not set.
    """

    dataset: DatasetSource
    documents: int = 3
    id: str | None = None
    max_tokens: int = 300
    html: Path | None = None
    colour: Literal["auto", "always", "never"] = "auto"

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("documents", "max_tokens"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {getattr(self, name)}: it must be at least 1")

    def lines(self) -> Iterator[str]:
        """Yield what to print, and write the page where one is wanted."""
        dataset = open_dataset(self.dataset)
        documents = load_previews(
            dataset,
            num_documents=self.documents,
            document_id=self.id,
            max_tokens=self.max_tokens,
        )
        if self.html is not None:
            self.html.write_text(render_preview(dataset.manifest, list(documents)), "utf-8")
            yield f"wrote {self.html}"
            return
        width = shutil.get_terminal_size((100, 24)).columns
        for document in documents:
            yield from draw_document(document, width=width, colour=_use_colour(self.colour))
        yield LEGEND


@dataclass(frozen=True)
class PlanOptions:
    """Rows, padding and steps per epoch; of a mixture, tokens and epochs by dataset and stage.

    Attributes:
        dataset: folder, URL or manifest of a dataset, or a mixture's FILE.toml.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row (default: from the dataset's ratio, with room to
            spare).
        global_batch_size: rows per step.
        num_steps: of the run on a mixture (default: as many as it gives).
        figure: write a picture of a mixture's epochs to this file, .svg or .html.
        replicas: student replicas that share a step.
        student_bos: token that stands before a student's text, its id, or none (default: the
            dataset's).
        student_eos: token that stands after a student's document, likewise.
        teacher_context: token that stands before a teacher's text, likewise.
        where: plan those documents only that this is true of, such as "language == 'en' and score >
            0.5"; any condition of DuckDB over the metadata.
    """

    dataset: DatasetSource
    seq_length: int
    teacher_seq_length: int | None = None
    global_batch_size: int = 1
    num_steps: int | None = None
    figure: Path | None = None
    replicas: int = 1
    student_bos: TokenName | None = None
    student_eos: TokenName | None = None
    teacher_context: TokenName | None = None
    where: Condition = ""

    def __post_init__(self) -> None:
        """Check that replicas share a step evenly."""
        if self.replicas < 1 or self.global_batch_size < 1:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} --replicas {self.replicas}: both "
                "must be at least 1"
            )
        if self.global_batch_size % self.replicas:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is no multiple of --replicas "
                f"{self.replicas}: every replica must get as many rows of a step"
            )
        for option, value in (("--num-steps", self.num_steps), ("--figure", self.figure)):
            if value is not None and not is_mixture(self.dataset):
                raise ValueError(f"{option} {value} tells of a mixture: {self.dataset} is none")
        if self.where and is_mixture(self.dataset):
            raise ValueError(
                f"--where {self.where} is of one dataset, and {self.dataset} a mixture of several: "
                'give its datasets a "where" there'
            )
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"--num-steps {self.num_steps}: it must be at least 1")
        require_drawable(self.figure)

    def lines(self) -> Iterator[str]:
        """Yield what to print, and draw the picture where one is wanted."""
        opened = open_run(
            Reading(
                path=self.dataset,
                where=self.where,
                student_bos=self.student_bos,
                student_eos=self.student_eos,
                teacher_context=self.teacher_context,
            )
        )
        rules = opened.rules(seq_length=self.seq_length, teacher_seq_length=self.teacher_seq_length)
        if opened.mixture.names:
            yield from self._mixture(opened, rules)
        else:
            yield from describe_plan(
                plan_dataset(opened.datasets[0], rules),
                global_batch_size=self.global_batch_size,
                num_replicas=self.replicas,
            )

    def _mixture(self, opened: OpenedRun, rules: PackingRules) -> Iterator[str]:
        num_rows = None if self.num_steps is None else self.num_steps * self.global_batch_size
        planned = plan_mixture_rows(opened, rules, num_rows=num_rows)
        yield from describe_mixture(planned, global_batch_size=self.global_batch_size)
        if self.figure is not None:
            draw_mixture(planned, self.figure)
            yield f"wrote {self.figure}"


_COMMANDS: dict[str, type[InfoOptions | PreviewOptions | PlanOptions]] = {
    "info": InfoOptions,
    "preview": PreviewOptions,
    "plan": PlanOptions,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 where it could not run."""
    try:
        options = parse_command(
            _COMMANDS,
            argv,
            prog="vocag explore",
            description="What is in a dataset, how it is aligned, how it would be packed.",
            epilog=_EPILOG,
        )
        for line in options.lines():
            print(line)
    except BrokenPipeError:
        # Whoever reads has enough (`| head`); stdout must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"explore: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def _use_colour(choice: str) -> bool:
    if choice == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return choice == "always"
