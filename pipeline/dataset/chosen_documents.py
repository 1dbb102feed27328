"""Choose a run's documents: those not removed and, with `where`, those that match.

`where` is a condition in DuckDB's SQL over metadata, counts and scores. A metadata field is named
in full, quoted if it contains dots, or by its last part if unambiguous; a score by its teacher, as
`qwen.bits_per_byte`. A null condition, as from a missing value, doesn't match.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.condition_process import LimitedQuery
from pipeline.dataset.conditions import WhereError
from pipeline.dataset.document_scores import SCORE_COLUMNS
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.named_scores import NamedScores, name_scores
from schemas.errors import DatasetError
from schemas.index import METADATA_TYPES, ShardIndex
from schemas.manifest import Manifest

Kept = NDArray[np.bool_] | None
"""bool [N], the documents of a shard to read; None: all of them."""

_COUNTS = {
    "num_text_bytes": pa.int64(),
    "num_student_tokens": pa.int64(),
    "num_teacher_tokens": pa.int64(),
}
_NAMED = {"document_id": pa.string(), "num_mapped": pa.int64(), "byte_iou_sum": pa.float32()}
"""Columns of an index with names."""

_READ_AHEAD = 8
"""Indices in memory: 10,000 documents of usual length take about 8 MB."""


@dataclass(frozen=True)
class ChosenDocuments:
    """The documents of a dataset that are read.

    `where` is a checked condition, with scores named by fingerprint; "" for none.
    """

    dataset: Dataset
    where: str = ""
    columns: tuple[str, ...] = ()
    scores: tuple[NamedScores, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every document in the shards is read."""
        return not self.where and self.dataset.is_whole

    @property
    def scores_digest(self) -> str:
        """64 hex digits over the losses used by the condition; "" without scores."""
        digests = "".join(named.digest for named in self.scores)
        return digests and sha256(digests.encode()).hexdigest()

    def each[Result](self, work: Callable[[ShardIndex, Kept], Result]) -> Iterator[Result]:
        """Apply a function to each result of `read`, in threads; yield in order."""
        for named in self.scores:
            named.scores.read_ranks(named.columns)
        waiting: deque[Future[Result]] = deque()
        pool = ThreadPoolExecutor(_READ_AHEAD)

        def read(shard_index: int) -> Result:
            return work(*self.read(shard_index))

        try:
            for shard_index in range(len(self.dataset.manifest.shards)):
                waiting.append(pool.submit(read, shard_index))
                if len(waiting) == _READ_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def read(
        self,
        shard_index: int,
        *,
        with_removed: bool = False,
        with_names: bool = False,
    ) -> tuple[ShardIndex, Kept]:
        """Return a shard's whole index, and which of its documents are read.

        `with_removed` includes removed ones; `with_names` reads ids and quality. DamagedShardError
        for a damaged file, WhereError for a value that can't be converted.
        """
        fields, needs_names = self._needed
        index = self.dataset.read_index(
            shard_index, with_names=with_names or needs_names, metadata=fields
        )
        removed = np.empty(0, np.int64) if with_removed else self.dataset.removed_of(shard_index)
        if not self.where and not len(removed):
            return index, None
        kept = np.ones(len(index), np.bool_)
        kept[removed] = False
        if self.where:
            kept = self._match(shard_index, index, kept)
        return index, None if kept.all() else kept

    @property
    def _needed(self) -> tuple[list[str], bool]:
        """The condition's metadata fields, and whether it needs names."""
        full = {entry.name: entry.name for entry in self.dataset.manifest.metadata}
        full |= _short_names(self.dataset.manifest)
        fields = {full[name] for name in self.columns if name in full}
        return sorted(fields), any(name in _NAMED for name in self.columns)

    def _match(
        self, shard_index: int, index: ShardIndex, read: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        table = _table(self.dataset.manifest, index)
        for named in self.scores:
            table = named.add_to(table, named.read(shard_index, index))
        # A table without columns loses its number of rows.
        named_only = table.select(self.columns or table.column_names[:1])
        matching, undecided = LimitedQuery(named_only).decide(self.where)
        for named in self.scores:
            if named.is_partial:
                places = np.flatnonzero(undecided & read)
                named.require_scored(self.where, places, shard_index, index)
        return matching & read


def select_documents(dataset: Dataset, where: str = "") -> ChosenDocuments:
    """Choose a dataset's documents by a condition; "" takes all that aren't removed.

    WhereError for a condition that is invalid, ill-typed or not deterministic, or whose columns or
    scores are missing or ambiguous.
    """
    where = where.strip()
    if not where:
        return ChosenDocuments(dataset)
    with _columns_told(dataset.manifest):
        table = _table(dataset.manifest)
        paths = LimitedQuery(table).find_paths(where)
    where, scores = name_scores(where, paths, dataset)
    with _columns_told(dataset.manifest):
        for named in scores:
            table = named.add_to(table)
        columns = tuple(LimitedQuery(table).require_condition(where))
    return ChosenDocuments(dataset, where, columns, scores)


def require_documents(num_documents: int, selection: ChosenDocuments) -> None:
    """Raise WhereError if a condition or removals leave no document."""
    if num_documents or selection.is_whole:
        return
    location, where = selection.dataset.location, selection.where
    if where:
        raise WhereError(
            f"no document of {location} matches {where}; {_told(selection.dataset.manifest)}"
        )
    raise WhereError(f"no document of {location} is left: all are removed")


def require_learned(documents: ChosenDocuments, column: str) -> None:
    """Raise DatasetError if a column of an index counts nothing of chats that is learned."""
    chats = documents.dataset.manifest.chats

    def has_some(index: ShardIndex, kept: Kept) -> bool:
        counts = index.chats[column]
        return bool(counts.any() if kept is None else counts[kept].any())

    if chats is None or any(documents.each(has_some)):
        return
    kind = column.removeprefix("num_learned_").replace("_", " ")
    which = f"the chats of {documents.dataset.location}"
    which += f" that match {documents.where}" * bool(documents.where)
    raise DatasetError(f"nothing is learned of {which}: no {kind}, as {why_nothing(chats.learn)}")


def why_nothing(learn: str) -> str:
    """Return why nothing may be learned of chats, and the remedy."""
    whose = {"assistant": "assistants' messages", "last": "each chat's last assistant's message"}
    return (
        f"--learn {learn} takes {whose.get(learn, 'all messages')}, and these are missing, empty "
        'or have "weight": 0: align chats with others, or with another --learn'
    )


def open_remaining(path: str) -> Dataset:
    """Open a dataset; WhereError if all its documents are removed."""
    dataset = open_dataset(path)
    gone = dataset.removed
    num_left = dataset.manifest.totals["num_documents"] - (0 if gone is None else len(gone))
    require_documents(num_left, ChosenDocuments(dataset))
    return dataset


@contextmanager
def _columns_told(manifest: Manifest) -> Iterator[None]:
    try:
        yield
    except WhereError as error:
        raise WhereError(f"{error}; {_told(manifest)}") from error


def _table(manifest: Manifest, index: ShardIndex | None = None) -> pa.Table:
    """The columns for conditions; unread ones are null."""
    size = 0 if index is None else len(index)
    values: dict[str, Any] = {}
    for name, kind in (_COUNTS | _NAMED).items():
        given = getattr(index, name, ())
        values[name] = pa.array(given, kind) if len(given) == size else pa.nulls(size, kind)
    metadata = {} if index is None else index.metadata
    for entry in manifest.metadata:
        missing = pa.nulls(size, METADATA_TYPES[entry.type])
        values[entry.name] = metadata.get(entry.name, missing)
    for short, name in _short_names(manifest).items():
        values[short] = values[name]
    return pa.table(values)


def _short_names(manifest: Manifest) -> dict[str, str]:
    """Map unambiguous last parts of dotted fields to the fields."""
    names = [entry.name for entry in manifest.metadata]
    taken = {name.lower() for name in (*names, *_COUNTS, *_NAMED)}
    lasts = [name.rpartition(".")[2].lower() for name in names]
    return {
        name.rpartition(".")[2]: name
        for name, last in zip(names, lasts, strict=True)
        if last not in taken and lasts.count(last) == 1
    }


def _told(manifest: Manifest) -> str:
    fields = [f'"{entry.name}" ({entry.type})' for entry in manifest.metadata]
    columns = ", ".join([*fields, *_COUNTS, *_NAMED])
    scores = ", ".join(SCORE_COLUMNS)
    losses = f'of stored losses, as "TEACHER".COLUMN, {scores}'
    return f"the columns are {columns}; and {losses}; texts take single quotes"
