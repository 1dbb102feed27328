"""Count a dataset by a metadata field, from the indices alone."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from math import isfinite

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from schemas.manifest import Manifest, ShardRecord

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Group:
    """The documents with one value of a field, None if missing.

    Fractions are grouped by their first digit, as "0.2 to 0.3". `byte_iou_sum` adds up the mapped
    tokens' intersections over union, in bytes.
    """

    value: Value
    num_documents: int
    num_text_bytes: int
    num_student_tokens: int
    num_teacher_tokens: int
    num_mapped: int
    byte_iou_sum: float

    @property
    def num_unmapped(self) -> int:
        """Student tokens without a teacher token."""
        return self.num_student_tokens - self.num_mapped

    @property
    def byte_iou(self) -> float:
        """Mean IoU of mapped tokens."""
        return self.byte_iou_sum / max(self.num_mapped, 1)


_SIZES = ("num_text_bytes", "num_student_tokens", "num_teacher_tokens")
_SUMS = (*_SIZES, "num_mapped", "byte_iou_sum")


def require_field(manifest: Manifest, name: str) -> None:
    """Raise ValueError, listing the known fields, if metadata lack a field."""
    if name not in [entry.name for entry in manifest.metadata]:
        known = ", ".join(f"{entry.name} ({entry.type})" for entry in manifest.metadata)
        there = f"it has {known}" if known else "none was given to align --metadata"
        raise ValueError(f'the dataset has no metadata "{name}": {there}')


def count_by(dataset: Dataset, name: str) -> list[Group]:
    """Count documents by a field's values, most tokens first; ValueError if it is unknown."""
    require_field(dataset.manifest, name)
    sums: dict[Value, NDArray[np.float64]] = defaultdict(lambda: np.zeros(1 + len(_SUMS)))
    for part in dataset.map_shards(lambda shard: list(_count_shard(dataset, shard, name))):
        for value, own in part:
            sums[value] += own
    groups = []
    for value, (*counts, iou) in sums.items():
        documents, text, student, teacher, mapped = map(int, counts)
        groups.append(Group(value, documents, text, student, teacher, mapped, float(iou)))
    return sorted(groups, key=lambda group: (-group.num_student_tokens, str(group.value)))


def count_read(dataset: Dataset) -> Manifest:
    """Return a manifest whose shards count only documents that are read.

    Bytes on disk and statistics still cover removed ones.
    """
    if dataset.is_whole:
        return dataset.manifest

    def count(shard_index: int) -> ShardRecord:
        record, removed = dataset.manifest.shards[shard_index], dataset.removed_of(shard_index)
        if not len(removed):
            return record
        index = dataset.read_index(shard_index)
        gone = {name: int(getattr(index, name)[removed].sum()) for name in _SIZES}
        left = {name: getattr(record, name) - count for name, count in gone.items()}
        return replace(record, num_documents=record.num_documents - len(removed), **left)

    return replace(dataset.manifest, shards=tuple(dataset.map_shards(count)))


def _count_shard(
    dataset: Dataset, shard_index: int, name: str
) -> Iterator[tuple[Value, NDArray[np.float64]]]:
    index = dataset.read_index(shard_index, with_names=True, metadata=[name])
    values = index.metadata[name]
    if pa.types.is_dictionary(values.type):
        values = values.cast(pa.string())
    columns = {column: getattr(index, column) for column in _SUMS}
    table = pa.table({"value": values, "num_documents": np.ones(len(index), np.int64), **columns})
    table = table.take(np.delete(np.arange(len(index)), dataset.removed_of(shard_index)))
    names = ["num_documents", *_SUMS]
    grouped = table.group_by("value").aggregate([(column, "sum") for column in names])
    sums = np.stack([grouped.column(f"{column}_sum").to_numpy() for column in names], axis=1)
    yield from zip(map(_group_of, grouped.column("value").to_pylist()), sums, strict=True)


def _group_of(value: Value) -> Value:
    """Return a fraction's range, of one first digit; the end nearer to 0 is in it."""
    if not isinstance(value, float) or not value or not isfinite(value):
        return value
    exact = Decimal(repr(value))
    power = exact.adjusted()
    digit = exact.as_tuple().digits[0] * (1 if value > 0 else -1)
    ends = (float(f"{end}e{power}") for end in sorted((digit, digit + (1 if value > 0 else -1))))
    return " to ".join(map(str, ends))
