"""A representative sample of a job's input.

Every byte has the same chance. Documents' positions, not lengths, show a part's sampled share:
records have other fields, and compressed files expand.
"""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import cast

from beam_jobs import storage
from beam_jobs.align.inputs.decompression import DamageError, decompress
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import DeadLetter, Outcome, PlacedDocument, ReadingRules
from beam_jobs.align.inputs.formats import FORMATS
from beam_jobs.align.inputs.parts import DATASET, TASK_BYTES, InputFile, InputPart, cut_files
from beam_jobs.align.inputs.tables import count_rows

LEAST_PART_BYTES = 128 << 10

MEASURED_BYTES = 2 << 20
"""Stored bytes that are decompressed to measure a file's expansion."""

_HELD_BACK = {"bzip2": 450_000}
"""Bytes missing from cut data on average: half of bzip2's blocks of 900 kB."""

_CHUNK_BYTES = 1 << 20
_OPEN_THREADS = 16

HEAD_LETTERS = 1000
"""A file that begins with this many unusable documents counts as unusable."""


@dataclass(frozen=True)
class SampleSize:
    """Most places, documents and bytes to sample; each place has at least one document."""

    num_places: int
    num_documents: int
    num_bytes: int


FIRST_LOOK = SampleSize(4, 128, 256 << 10)
ESTIMATE = SampleSize(24, 2000, 4 << 20)


@dataclass(frozen=True)
class SampledPart:
    """The first documents of a part, which represents `weight` times its size.

    They cover `num_passed` of its units; None means all.
    """

    part: InputPart
    outcomes: tuple[Outcome, ...]
    weight: float
    num_passed: int | None

    @property
    def documents(self) -> list[PlacedDocument]:
        """The usable ones."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, PlacedDocument)]

    def measure_scale(self) -> float:
        """Return the ratio of the represented input to these documents; rereads the file."""
        if self.num_passed is None:
            return self.weight
        passed = max(1, self.num_passed)
        return self.weight * max(1.0, _num_units(self.part) / passed)


def sample_input(
    files: Sequence[InputFile], rules: ReadingRules, size: SampleSize
) -> list[SampledPart]:
    """Sample the input."""
    chosen = _choose(files, size.num_places)
    most = max(1, size.num_documents // max(1, len(chosen)))
    most_bytes = size.num_bytes // max(1, len(chosen))
    sample = [_read_first(part, rules, weight, most, most_bytes) for part, weight in chosen]
    return [sampled for sampled in sample if sampled.outcomes]


def look_at_heads(files: Sequence[InputFile], rules: ReadingRules) -> dict[str, list[DeadLetter]]:
    """Dead letters, by source, of files that begin with no usable document."""
    with ThreadPoolExecutor(_OPEN_THREADS) as pool:
        heads = pool.map(partial(_read_head, rules=rules), files)
    return {file.source: head for file, head in zip(files, heads, strict=True) if head}


def _read_head(file: InputFile, rules: ReadingRules) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    for outcome in islice(read_part(InputPart(file), rules), HEAD_LETTERS):
        if isinstance(outcome, PlacedDocument):
            return []
        letters.append(outcome)
    return letters


def _choose(files: Sequence[InputFile], num_places: int) -> list[tuple[InputPart, float]]:
    """Parts, each with the multiple of its size that it represents."""
    most_bytes = max(LEAST_PART_BYTES, sum(file.num_bytes for file in files) // num_places)
    cut = cut_files(files, task_bytes=min(most_bytes, TASK_BYTES))
    parts = [(part, size) for part, size in cut if size]
    if len(parts) <= num_places:
        return [(part, 1.0) for part, _ in parts]
    step = sum(size for _, size in parts) / num_places
    chosen, passed = [], step / 2  # the first of equally spaced places
    for part, size in parts:
        passed -= size
        times = 0
        while passed < 0:
            times += 1
            passed += step
        if times:
            chosen.append((part, times * step / size))
    return chosen


def _read_first(
    part: InputPart, rules: ReadingRules, weight: float, most: int, most_bytes: int
) -> SampledPart:
    outcomes: list[Outcome] = []
    num_bytes = 0
    for outcome in read_part(part, rules):
        if len(outcomes) == most or num_bytes >= most_bytes:
            num_passed = outcome.position - outcomes[0].position
            return SampledPart(part, tuple(outcomes), weight, num_passed)
        outcomes.append(outcome)
        num_bytes += len(outcome.text) if isinstance(outcome, PlacedDocument) else 0
    return SampledPart(part, tuple(outcomes), weight, None)


def _num_units(part: InputPart) -> float:
    """Approximate a part's rows or uncompressed bytes: its positions' unit."""
    if part.file.format == DATASET and part.end is not None:
        return part.end - part.start
    if not FORMATS[part.file.format].table:
        return _num_uncompressed_bytes(part)
    num_rows, num_bytes = count_rows(part)
    return num_rows if num_bytes is None else num_rows * _num_uncompressed_bytes(part) / num_bytes


def _num_uncompressed_bytes(part: InputPart) -> float:
    file = part.file
    if file.compression == "none":
        return (file.num_bytes if part.end is None else part.end) - part.start
    with storage.open_to_read(file.path) as stored:
        start = stored.read(MEASURED_BYTES)
    return file.num_bytes / len(start) * _num_decompressed(start, file.compression)


def _num_decompressed(start: bytes, compression: str) -> int:
    num_bytes = 0
    try:
        file = cast(io.BufferedReader, decompress(io.BytesIO(start), compression))
        while data := file.read1(_CHUNK_BYTES):
            num_bytes += len(data)
    except DamageError:  # cut here, in the middle of a frame
        return num_bytes + _HELD_BACK.get(compression, 0)
    return num_bytes
