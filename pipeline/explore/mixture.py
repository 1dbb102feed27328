"""A mixture's tokens and epochs, by dataset and stage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.command_line.failures import printable
from pipeline.dataset.chosen_documents import require_documents
from pipeline.drawing.formatting import (
    format_count,
    format_plural,
    format_share,
    format_short,
    format_table,
)
from pipeline.packing.mixture_file import Mixture
from pipeline.packing.mixture_plan import PERIOD, MixturePlan, Source, plan_mixture
from pipeline.packing.opening import OpenedDataset, OpenedRun
from pipeline.packing.plan import RowPlan, plan_rows
from pipeline.packing.rules import PackingRules

_BAR_COLUMNS = 24


@dataclass(frozen=True)
class PlannedMixture:
    """The rows that a run would read of a mixture.

    Without an end, they last until each dataset of the last stretch was read once more.
    """

    mixture: Mixture
    rules: PackingRules
    plan: MixturePlan
    num_rows: int


def plan_mixture_rows(
    opened: OpenedRun, rules: PackingRules, *, num_rows: int | None = None
) -> PlannedMixture:
    """Plan a mixture's first `num_rows` rows; None: all.

    Raises:
        ValueError: datasets that don't fit together, or have too few rows.
    """
    mixture = opened.mixture
    sources: list[Source] = []
    documents: list[NDArray[np.uint32]] = []
    for dataset in opened.datasets:
        entry, rows = dataset.entry, plan_dataset(dataset, rules)
        sources.append(Source(entry.name, len(rows), rows.num_text_tokens[0], entry.max_epochs))
        # Not needed for whole datasets, where they would take gigabytes.
        documents.append(np.unique(rows.segments["document"] if entry.where else ()))
    opened.require_no_overlap(documents)
    plan = plan_mixture(sources, mixture.stages)
    last = plan.num_rows or _once_more(plan)
    if num_rows is not None and plan.num_rows is not None and num_rows > plan.num_rows:
        raise ValueError(
            f"{mixture.path} has {plan.num_rows} rows, the run needs {num_rows}: raise max_epochs, "
            "let a dataset repeat, or make fewer steps"
        )
    return PlannedMixture(mixture, rules, plan, num_rows or last)


def plan_dataset(opened: OpenedDataset, rules: PackingRules) -> RowPlan:
    """Plan a dataset's rows; WhereError if no document is read."""
    plan = plan_rows(opened.documents.each, rules)
    require_documents(len(plan), opened.documents)
    return plan


def describe_mixture(planned: PlannedMixture, *, global_batch_size: int) -> Iterator[str]:
    """Yield `explore plan`'s lines on a mixture."""
    plan, rules = planned.plan, planned.rules
    yield printable(
        f"{planned.mixture.path}: rows of {format_count(rules.seq_length)} student and "
        f"{format_count(rules.teacher_seq_length)} teacher tokens"
    )
    for entry in planned.mixture.datasets:
        if entry.where:
            yield printable(f"{entry.name}: where {entry.where}")
    starts = (stretch.start for stretch in plan.stretches if stretch.start < planned.num_rows)
    for start, stop in pairwise([*starts, planned.num_rows]):
        yield ""
        yield from _stretch(planned, start, stop)
        yield from map(printable, _used_up(plan, stop))
    yield ""
    tokens = sum(plan.tokens_before(planned.num_rows))
    end = "; the mixture has no end" if plan.num_rows is None else ""
    steps = format_plural(planned.num_rows // global_batch_size, "step")
    yield (
        f"{format_plural(planned.num_rows, 'row')}, {format_short(tokens)} student tokens, {steps} "
        f"of {format_plural(global_batch_size, 'row')}{end}"
    )


def _once_more(plan: MixturePlan) -> int:
    last = plan.stretches[-1]
    rows = [
        -(-source.num_rows * PERIOD // share)
        for source, share in zip(plan.sources, last.shares, strict=True)
        if share
    ]
    return last.start + max(rows)


def _stretch(planned: PlannedMixture, start: int, stop: int) -> list[str]:
    plan = planned.plan
    stretch = plan.stretch_at(start)
    weights = planned.mixture.stages[stretch.stage].weights
    before, after = plan.counts_before(start), plan.counts_before(stop)
    tokens = [
        b - a for a, b in zip(plan.tokens_before(start), plan.tokens_before(stop), strict=True)
    ]
    heading = ["dataset", "weight", "rows", "student tokens", "of them", "epochs", "so far", ""]
    rows = [heading]
    for number, source in enumerate(plan.sources):
        if source.name not in weights:
            continue
        count = after[number] - before[number]
        rows.append(
            [
                printable(source.name),
                format_share(weights[source.name], 1),
                format_count(count),
                format_short(tokens[number]),
                format_share(tokens[number], sum(tokens)),
                f"{count / source.num_rows:.2f}",
                f"{after[number] / source.num_rows:.2f}",
                "█" * round(_BAR_COLUMNS * tokens[number] / sum(tokens)),
            ]
        )
    since = format_short(sum(plan.tokens_before(start)))
    title = (
        f"stage {stretch.stage + 1}, rows {format_count(start)} to {format_count(stop - 1)}, "
        f"from {since} student tokens"
    )
    return [title, *format_table(rows, align="<>>>>>><")]


def _used_up(plan: MixturePlan, stop: int) -> Iterator[str]:
    """Name the datasets whose last row comes just before a run position."""
    before, after = plan.counts_before(stop - 1), plan.counts_before(stop)
    columns: Sequence[tuple[Source, int, int]] = list(zip(plan.sources, before, after, strict=True))
    for source, earlier, count in columns:
        if earlier < count == source.total_rows:
            epochs = "its epoch" if source.max_epochs == 1 else f"its {source.max_epochs} epochs"
            yield f"{source.name} has given {epochs}: others of the stage take over its share"
