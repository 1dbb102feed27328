"""`vocag explore`: a dataset's content, alignment and packing."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeline.command_line.option_parsing import (
    DatasetSource,
    Option,
    naming_options,
    parse_command,
    require_known,
    require_least,
)
from pipeline.drawing.printing import prints, write_page
from pipeline.packing.reading import Reading

# Commands' modules are imported in `lines`: help needs no numpy.

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
  vocag explore cells aligned
      Which student tokens stand for a teacher's, as vocag train --method distill counts them.
  vocag explore scores aligned --by source --at 0.5 0.9 0.95 0.99 --html scores.html
      What a threshold on a teacher's bits per byte keeps, and texts around it.
  vocag explore plan gs://bucket/aligned --seq-length 2048 --global-batch-size 256
      Rows, padding and steps per epoch, before anything is trained.
  vocag explore plan mixture.toml --seq-length 2048
      Tokens and epochs of each dataset in each stage of a mixture.
  vocag explore plan aligned --seq-length 2048 --where "language == 'en' and score > 0.5"
      The same of some documents.
"""


@dataclass(frozen=True)
class InfoOptions:
    """Totals, lengths, tokenizers, dead letters, shards.

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        by: count documents, tokens, unmapped share and IoU by this field of the documents'
            metadata instead; fractions in ranges of one first digit, such as 0.2 to 0.3.
    """

    dataset: DatasetSource
    by: Annotated[str, Option("FIELD")] = ""

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        from pipeline.dataset.chosen_documents import open_remaining
        from pipeline.dataset.files import open_dataset
        from pipeline.explore.info import describe_dataset, describe_groups

        if self.by:
            return describe_groups(open_remaining(self.dataset), self.by)
        return describe_dataset(open_dataset(self.dataset))


@dataclass(frozen=True)
class PreviewOptions:
    """Documents with both tokenizations.

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        documents: number of documents, from the first on.
        id: show the document of this id instead.
        max_tokens: student tokens shown of each.
        html: write a page to this file instead of drawing in the terminal.
    """

    dataset: DatasetSource
    documents: int = 3
    id: str | None = None
    max_tokens: int = 300
    html: Path | None = None

    def __post_init__(self) -> None:
        require_least(self, "documents", "max_tokens")

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        from pipeline.dataset.chosen_documents import open_remaining
        from pipeline.drawing.terminal_blocks import LEGEND, draw_document
        from pipeline.explore.preview import load_previews, render_page

        dataset = open_remaining(self.dataset)
        documents = load_previews(
            dataset,
            num_documents=self.documents,
            document_id=self.id,
            max_tokens=self.max_tokens,
        )
        if self.html is not None:
            write_page(self.html, render_page(dataset, documents))
            yield f"wrote {self.html}"
            return
        width = shutil.get_terminal_size((100, 24)).columns
        for document in documents:
            yield from draw_document(document, width=width)
        yield LEGEND


@dataclass(frozen=True)
class CellsOptions:
    """Student tokens that stand for the same of a teacher's: what distill compares.

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        largest: cells to list.
    """

    dataset: DatasetSource
    largest: int = 20

    def __post_init__(self) -> None:
        require_least(self, "largest")

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        from pipeline.command_line.failures import printable
        from pipeline.dataset.chosen_documents import open_remaining
        from pipeline.distributions.pair import look_at_pair
        from pipeline.drawing.formatting import format_count

        found = look_at_pair(open_remaining(self.dataset), num_cells=self.largest)
        yield f"labels counted                        {format_count(found.num_labels)}"
        yield f"start inside a teacher token          {found.inside:.1%}"
        yield f"others than the teacher's beginning   {found.differing:.1%} of those at a boundary"
        yield f"learn no distribution                 {found.crossing:.1%}"
        yield ""
        if not found.num_cells:
            yield "no two tokens stand for each other"
            return
        yield f"largest of {format_count(found.num_cells)} cells with several tokens:"
        for cell in found.cells:
            yield f"  {printable(cell)}"


@dataclass(frozen=True)
class ScoresOptions:
    """Documents by teachers' stored losses: how much each threshold keeps, and texts to look at.

    Attributes:
        dataset: folder, URL or manifest of a dataset that vocag score has scored.
        teacher: a score as conditions name it; repeat it for several (default: all of them).
        column: score to look at, such as bits_per_byte, largest_window or rank.
        by: compare the values of this field of the documents' metadata.
        at: quantiles (default: 0.01 0.05 0.25 0.5 0.75 0.95 0.99).
        documents: documents that the page shows around each quantile of the first teacher.
        html: write a page with charts and texts to this file.
    """

    dataset: DatasetSource
    teacher: Annotated[tuple[str, ...] | None, Option("NAME", form="repeated")] = None
    column: str = "bits_per_byte"
    by: Annotated[str, Option("FIELD")] = ""
    at: Annotated[tuple[float, ...], Option("Q")] = ()
    documents: int = 1
    html: Path | None = None

    def __post_init__(self) -> None:
        if outside := [each for each in self.at if not 0 <= each <= 1]:
            raise ValueError(f"--at {outside[0]:g}: a quantile is from 0 to 1")
        require_least(self, "documents")

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        from pipeline.dataset.chosen_documents import open_remaining
        from pipeline.dataset.document_scores import SCORE_COLUMNS
        from pipeline.explore.scores import QUANTILES, describe_scores, named_scores, read_table
        from pipeline.explore.scores_page import render_scores

        require_known("--column ", [self.column], SCORE_COLUMNS)
        dataset, quantiles = open_remaining(self.dataset), self.at or QUANTILES
        scores = named_scores(dataset, self.teacher or ())
        columns = {name: (own, self.column) for name, own in scores.items()}
        table = read_table(dataset, columns, by=self.by)
        yield from describe_scores(table, self.column, quantiles, by=self.by)
        if self.html is not None:
            page = render_scores(
                dataset,
                scores,
                table,
                column=self.column,
                quantiles=quantiles,
                num_documents=self.documents,
            )
            write_page(self.html, page)
            yield f"wrote {self.html}"


@dataclass(frozen=True)
class PlanOptions:
    """Rows, padding and steps per epoch; of a mixture, tokens and epochs by dataset and stage.

    Attributes:
        dataset: what to plan.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row (default: from the dataset's ratio, with room to
            spare).
        global_batch_size: rows per step.
        num_steps: steps of the run on a mixture (default: as many as it gives).
    """

    dataset: Annotated[Reading, Option(form="positional")]
    seq_length: int
    teacher_seq_length: int | None = None
    global_batch_size: int = 1
    num_steps: int | None = None

    def __post_init__(self) -> None:
        require_least(self, "global_batch_size", "num_steps")

    def lines(self) -> Iterator[str]:
        """Yield the output."""
        from pipeline.explore.info import describe_plan
        from pipeline.explore.mixture import describe_mixture, plan_dataset, plan_mixture_rows
        from pipeline.packing.opening import open_run
        from pipeline.packing.rules import PackingRules

        opened = open_run(self.dataset)
        rules = PackingRules.of_dataset(
            opened.manifest,
            seq_length=self.seq_length,
            teacher_seq_length=self.teacher_seq_length,
        )
        if opened.mixture.names:
            num_rows = None if self.num_steps is None else self.num_steps * self.global_batch_size
            planned = plan_mixture_rows(opened, rules, num_rows=num_rows)
            yield from describe_mixture(planned, global_batch_size=self.global_batch_size)
            return
        if self.num_steps is not None:
            raise ValueError(
                f"--num-steps {self.num_steps} is for mixtures: {self.dataset.path} isn't one"
            )
        plan = plan_dataset(opened.datasets[0], rules)
        yield from describe_plan(plan, global_batch_size=self.global_batch_size)


_Commands = InfoOptions | PreviewOptions | CellsOptions | ScoresOptions | PlanOptions
_COMMANDS: dict[str, type[_Commands]] = {
    "info": InfoOptions,
    "preview": PreviewOptions,
    "cells": CellsOptions,
    "scores": ScoresOptions,
    "plan": PlanOptions,
}


@prints("vocag explore")
def main(argv: list[str] | None = None) -> Iterator[str]:
    """Run the command."""
    options = parse_command(
        _COMMANDS,
        argv,
        prog="vocag explore",
        description="What is in a dataset, how it is aligned, how it would be packed.",
        epilog=_EPILOG,
    )
    with naming_options(type(options)):
        yield from options.lines()
