"""Quantiles of documents' stored scores, and effects of thresholds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.command_line.failures import hinted, printable
from pipeline.dataset.document_scores import ScoredDataset, open_scored_documents
from pipeline.dataset.files import Dataset
from pipeline.dataset.groups import require_field
from pipeline.dataset.score_files import list_scores, scores_of, scoring_command
from pipeline.drawing.formatting import (
    format_count,
    format_plural,
    format_share,
    format_table,
)
from schemas.document_score_table import STORED_COLUMNS
from schemas.errors import DatasetError, ForeignLossesError

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
MAX_GROUPS = 20

_BINS, _BARS = 24, " ▁▂▃▄▅▆▇█"
_ENDS = (0.005, 0.995)
"""Quantiles between which histograms are drawn; their outer bins include values beyond them."""


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """Scores of N documents, int64 or float64 [N].

    `place` is a document's in its shard's index, `group` the text of a metadata field, or "".
    `values` are by displayed name, NaN if missing.
    """

    shard: NDArray[np.int64]
    place: NDArray[np.int64]
    num_text_bytes: NDArray[np.int64]
    group: NDArray[np.str_]
    values: Mapping[str, NDArray[np.float64]]

    def groups(self) -> list[tuple[str, NDArray[np.bool_]]]:
        """Return the largest groups, with their documents, bool [N]."""
        names, counts = np.unique(self.group, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:MAX_GROUPS]
        return [(str(names[each]), self.group == names[each]) for each in order]


@dataclass(frozen=True)
class Threshold:
    """Effect of `column <= value`; `quantile` is a share of scored documents."""

    quantile: float
    value: float
    num_documents: int
    num_bytes: int


def read_table(
    dataset: Dataset, columns: Mapping[str, tuple[ScoredDataset, str]], *, by: str = ""
) -> ScoreTable:
    """Read scores of all documents that aren't removed.

    `columns` maps displayed names to scores and one of `SCORE_COLUMNS`.

    Raises:
        ValueError: no such field.
        DatasetError: a damaged index, table or sidecar.
    """
    if by:
        require_field(dataset.manifest, by)
    for scores, column in columns.values():
        scores.read_ranks([column])

    def read(shard: int) -> tuple[NDArray[Any], ...]:
        found = [own.read(shard, [name, "num_text_bytes"]) for own, name in columns.values()]
        lengths = found[0]["num_text_bytes"]
        group = np.full(len(lengths), "")
        if by:
            told = dataset.read_index(shard, metadata=[by]).metadata[by].to_pylist()
            group = np.array(["(none)" if each is None else printable(str(each)) for each in told])
        values = [own[name] for own, (_, name) in zip(found, columns.values(), strict=True)]
        read = np.delete(np.arange(len(lengths)), dataset.removed_of(shard))
        every = (np.full(len(lengths), shard), np.arange(len(lengths)), lengths, group, *values)
        return tuple(each[read] for each in every)

    parts = zip(*dataset.map_shards(read), strict=True)
    shard, place, lengths, group, *values = map(np.concatenate, parts)
    by_name = {name: each.astype(np.float64) for name, each in zip(columns, values, strict=True)}
    return ScoreTable(shard, place, lengths, group, by_name)


def find_thresholds(
    values: NDArray[np.float64], num_text_bytes: NDArray[np.int64], quantiles: Sequence[float]
) -> list[Threshold]:
    """Return the effects of thresholds at some quantiles."""
    # NaN sorts last.
    order = np.argsort(values, kind="stable")[: np.count_nonzero(~np.isnan(values))]
    ordered, found = values[order], []
    for quantile in quantiles if len(order) else ():
        value = ordered[place_of(quantile, len(order))]
        count = int(np.searchsorted(ordered, value, "right"))
        num_bytes = int(num_text_bytes[order[:count]].sum())
        found.append(Threshold(quantile, float(value), count, num_bytes))
    return found


def place_of(quantile: float, count: int) -> int:
    """Return a quantile's place in an ordered list."""
    # Rounded: 0.35 times 20 is a little more than 7.
    return max(0, ceil(round(quantile * count, 6)) - 1)


def describe_scores(
    table: ScoreTable, column: str, quantiles: Sequence[float], *, by: str
) -> Iterator[str]:
    """Yield `explore scores`'s lines."""
    for name, values in table.values.items():
        missing = int(np.isnan(values).sum())
        yield (
            f"{printable(name)}: {column} of {format_plural(len(values) - missing, 'document')}; "
            f"{format_count(missing)} more have none"
        )
        yield from describe_thresholds(table, values, column, quantiles)
        yield ""
        if by:
            yield from _describe_groups(table, values, by)
            yield ""


def describe_thresholds(
    table: ScoreTable, values: NDArray[np.float64], column: str, quantiles: Sequence[float]
) -> list[str]:
    """Tabulate what thresholds keep."""
    rows = [["quantile", f"{column} <=", "documents", "", "text bytes", ""]]
    all_bytes = int(table.num_text_bytes.sum())
    for each in find_thresholds(values, table.num_text_bytes, quantiles):
        rows.append(
            [
                f"{each.quantile:g}",
                f"{each.value:.4g}",
                format_count(each.num_documents),
                format_share(each.num_documents, len(values)),
                format_count(each.num_bytes),
                format_share(each.num_bytes, all_bytes),
            ]
        )
    return format_table(rows, align=">>>>>>")


def describe_quantiles(dataset: Dataset) -> Iterator[str]:
    """Yield quantiles of all stored scores, for `explore info`."""
    rows = [["score", "column", *(f"{quantile:g}" for quantile in QUANTILES)]]
    for files in list_scores(dataset.location):
        rule, name = files.manifest.rule, files.manifest.source.rstrip("/").rpartition("/")[2]
        name = f"{printable(name)} ({rule.fingerprint[:8]})"
        try:
            scores = ScoredDataset(dataset, scores_of(files, dataset))
        except ForeignLossesError:
            rows.append([name, "of a different generation: run vocag score again", *[""] * 7])
            continue
        table = read_table(dataset, {column: (scores, column) for column in STORED_COLUMNS})
        for column, values in table.values.items():
            found = find_thresholds(values, table.num_text_bytes, QUANTILES)
            told = [f"{each.value:.4g}" for each in found] or [""] * len(QUANTILES)
            rows.append([name, column, *told])
    if len(rows) > 1:
        yield from format_table(rows, align="<<" + ">" * len(QUANTILES))
        yield ""


def bin_edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a histogram's edges, float64 [25]; NaN is ignored."""
    known = values[~np.isnan(values)]
    low, high = np.quantile(known, _ENDS) if len(known) else (0.0, 1.0)
    return np.linspace(low, max(high, low + 1e-6), _BINS + 1)


def count_bins(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Count values per bin, int64 [24]; outer bins include values beyond them."""
    known = values[~np.isnan(values)]
    return np.histogram(np.clip(known, edges[0], edges[-1]), edges)[0]


def named_scores(dataset: Dataset, names: Sequence[str]) -> dict[str, ScoredDataset]:
    """Return scores by name; without names, all of the newest state.

    Raises:
        DatasetError: scores are missing, ambiguous or of another generation.
    """
    names = names or [
        files.manifest.rule.fingerprint[:16] for files in list_scores(dataset.location)
    ]
    if not names:
        missing = DatasetError(f"no teacher has scored {dataset.location}: run vocag score first")
        raise hinted(missing, scoring_command(dataset.location))
    opened = [open_scored_documents(name, dataset, "--teacher {}".format) for name in names]
    sources = [own.files.manifest.source.rstrip("/").rpartition("/")[2] for own in opened]
    return {
        source if sources.count(source) == 1 else f"{source} {own.name[:8]}": own
        for source, own in zip(sources, opened, strict=True)
    }


def _describe_groups(table: ScoreTable, values: NDArray[np.float64], by: str) -> Iterator[str]:
    edges = bin_edges(values)
    span = f"{edges[0]:.3g} to {edges[-1]:.3g}"
    rows = [[printable(by), "documents", "0.05", "0.5", "0.95", span]]
    for name, chosen in table.groups():
        found = find_thresholds(values[chosen], table.num_text_bytes[chosen], (0.05, 0.5, 0.95))
        cells = [f"{each.value:.4g}" for each in found] or ["", "", ""]
        rows.append([name, format_count(int(chosen.sum())), *cells, _bars(values[chosen], edges)])
    yield from format_table(rows, align="<>>>><")


def _bars(values: NDArray[np.float64], edges: NDArray[np.float64]) -> str:
    counts = count_bins(values, edges)
    heights = np.ceil(counts * (len(_BARS) - 1) / max(1, counts.max())).astype(int)
    return "".join(_BARS[height] for height in heights)
