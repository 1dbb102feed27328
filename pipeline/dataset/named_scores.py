"""Scores of documents in a condition: `qwen.bits_per_byte < 1.5`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from shlex import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.conditions import WhereError
from pipeline.dataset.document_scores import SCORE_COLUMNS, ScoredDataset, open_scored_documents
from pipeline.dataset.files import Dataset
from schemas.errors import DatasetError
from schemas.index import ShardIndex

_NAME = re.compile(rb'"(?:[^"]|"")*"|[^\W\d][\w$]*')
"""A name in SQL, quoted or not, in UTF-8; letters beyond ASCII need quotes."""


@dataclass(frozen=True)
class NamedScores:
    """A teacher's scores, and a condition's columns of them."""

    scores: ScoredDataset
    columns: tuple[str, ...]

    @property
    def digest(self) -> str:
        """64 hex digits over the columns' sources."""
        return self.scores.digest(self.columns)

    @property
    def is_partial(self) -> bool:
        """Whether a condition left documents out of the scores."""
        return bool(self.scores.files.manifest.rule.where)

    def read(self, shard_index: int, index: ShardIndex) -> pa.StructArray:
        """Read a shard's N structs of float64 with nulls."""
        values = self.scores.read(shard_index, self.columns, index).values()
        columns = [pa.array(each.astype(np.float64), from_pandas=True) for each in values]
        return pa.StructArray.from_arrays(columns, self.columns)

    def add_to(self, table: pa.Table, values: pa.StructArray | None = None) -> pa.Table:
        """Add these columns to a table, empty without values."""
        if values is None:
            values = pa.array([], pa.struct([(name, pa.float64()) for name in self.columns]))
        return table.append_column(self.scores.name, values)

    def require_scored(
        self, where: str, undecided: NDArray[np.int64], shard_index: int, index: ShardIndex
    ) -> None:
        """Raise WhereError if a condition is null for a document that wasn't scored."""
        files = self.scores.files
        missing = undecided[self.scores.lacks(shard_index, index)[undecided]]
        if len(missing):
            raise WhereError(
                f"where {where}: document {missing[0]} of "
                f"{self.scores.dataset.manifest.shards[shard_index].file} and "
                f"{len(missing) - 1} more have no score in {files.path}, which was made where "
                f"{files.manifest.rule.where}: make that part of the condition, or run "
                "vocag score without it"
            )


def name_scores(
    where: str, paths: Iterable[tuple[int, str, str]], dataset: Dataset
) -> tuple[str, tuple[NamedScores, ...]]:
    """Return a condition with its scores named by fingerprint, and these scores.

    So scores added later under that name don't change it. WhereError if scores are missing or
    ambiguous.
    """
    taken = {entry.name.lower() for entry in dataset.manifest.metadata}
    columns: dict[str, set[str]] = {}
    opened: dict[str, ScoredDataset] = {}
    names: dict[int, str] = {}
    found = list(paths)

    def rename(name: str, fingerprint: str) -> str:
        everywhere = {place: fingerprint for place, other, _ in found if other == name}
        return f"where={quote(_with_names(where, everywhere))}"

    for place, name, column in found:
        if column.lower() not in SCORE_COLUMNS or f"{name}.{column}".lower() in taken:
            continue  # refused later, with the known columns
        try:
            scores = opened.get(name) or open_scored_documents(name, dataset, partial(rename, name))
        except DatasetError as error:
            raise WhereError(f"where {where}: {error}") from error
        opened |= {name: scores, scores.name: scores}
        columns.setdefault(scores.name, set()).add(column.lower())
        names[place] = scores.name
    named = (NamedScores(opened[name], tuple(sorted(columns[name]))) for name in sorted(columns))
    return _with_names(where, names), tuple(named)


def _with_names(where: str, names: Mapping[int, str]) -> str:
    """Put other names, in double quotes, where a condition has some, by their places in bytes."""
    text, end, parts = where.encode(), 0, list[bytes]()
    for place, name in names.items():
        written = _NAME.match(text, place)
        assert written, f"{where} has no name at byte {place}"
        parts += [text[end:place], f'"{name}"'.encode()]
        end = written.end()
    return b"".join([*parts, text[end:]]).decode()
