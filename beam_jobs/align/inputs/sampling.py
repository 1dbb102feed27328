"""A sample of a job's input that stands for the whole, for `--dry-run`.

Pieces are chosen by their size, so a byte of any file has the same chance. What share of its piece
the sampled documents are follows from their places, not from the length of their texts: a record
has other fields, and a compressed file more bytes than are stored.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from beam_jobs import storage
from beam_jobs.align.inputs.decompression import DAMAGE, decompress
from beam_jobs.align.inputs.pieces import DATASET, TASK_BYTES, InputFile, Piece, cut_files
from beam_jobs.align.inputs.probes import Outcome
from beam_jobs.align.inputs.reading import PlacedDocument, ReadingRules, read_piece
from beam_jobs.align.inputs.tables import TABLES, DamagedTableError, count_rows

MOST_PLACES = 24
LEAST_PIECE_BYTES = 128 << 10
SAMPLE_DOCUMENTS = 2000
SAMPLE_BYTES = 4 << 20
"""Of all places together; each has at least one document, however long."""

MEASURED_BYTES = 2 << 20
"""Stored bytes that are decompressed to see how much a file's bytes expand."""

_HELD_BACK = {"bzip2": 450_000}
"""Of data that is cut: bzip2 hands on blocks of 900 kB; half of one is missing on average."""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class SampledPiece:
    """The first documents of a piece.

    Attributes:
        piece: where they are.
        outcomes: what became of them.
        scale: how many times as much the input holds as they do, where each sampled piece stands
            for its part of the input.
    """

    piece: Piece
    outcomes: tuple[Outcome, ...]
    scale: float

    @property
    def documents(self) -> list[PlacedDocument]:
        """Those that can be used."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, PlacedDocument)]


def sample_input(files: Sequence[InputFile], rules: ReadingRules) -> list[SampledPiece]:
    """Return a sample of the input.

    Example:
        >>> sample = sample_input(files, ReadingRules())  # doctest: +SKIP
        >>> sum(len(part.outcomes) * part.scale for part in sample)  # doctest: +SKIP
        120394.5
    """
    chosen = _choose(files)
    most = max(1, SAMPLE_DOCUMENTS // max(1, len(chosen)))
    most_bytes = SAMPLE_BYTES // max(1, len(chosen))
    sample = []
    for piece, weight in chosen:
        outcomes, share = _read_first(piece, rules, most, most_bytes)
        if outcomes:
            sample.append(SampledPiece(piece, tuple(outcomes), weight / share))
    return sample


def _choose(files: Sequence[InputFile]) -> list[tuple[Piece, float]]:
    """Return pieces, and for how many of its size each stands."""
    most_bytes = max(LEAST_PIECE_BYTES, sum(file.num_bytes for file in files) // MOST_PLACES)
    cut = cut_files(files, task_bytes=min(most_bytes, TASK_BYTES))
    pieces = [(piece, size) for piece, size in cut if size]
    if len(pieces) <= MOST_PLACES:
        return [(piece, 1.0) for piece, _ in pieces]
    step = sum(size for _, size in pieces) / MOST_PLACES
    chosen, passed = [], step / 2  # the first of equally spaced places
    for piece, size in pieces:
        passed -= size
        times = 0
        while passed < 0:
            times += 1
            passed += step
        if times:
            chosen.append((piece, times * step / size))
    return chosen


def _read_first(
    piece: Piece, rules: ReadingRules, most: int, most_bytes: int
) -> tuple[list[Outcome], float]:
    """Return a piece's first outcomes, and which share of the piece they are."""
    outcomes: list[Outcome] = []
    num_bytes = 0
    for outcome in read_piece(piece, rules):
        if len(outcomes) == most or num_bytes >= most_bytes:
            passed = outcome.position - outcomes[0].position
            return outcomes, min(1.0, passed / max(_num_units(piece), passed))
        outcomes.append(outcome)
        num_bytes += len(outcome.text) if isinstance(outcome, PlacedDocument) else 0
    return outcomes, 1.0


def _num_units(piece: Piece) -> float:
    """Return about how many rows or uncompressed bytes a piece has: what its positions count."""
    if piece.format == DATASET and piece.end is not None:
        return piece.end - piece.start
    if piece.format not in TABLES:
        return _num_uncompressed_bytes(piece)
    try:
        num_rows, num_bytes = count_rows(piece)
    except DamagedTableError as error:
        return error.position
    return num_rows if num_bytes is None else num_rows * _num_uncompressed_bytes(piece) / num_bytes


def _num_uncompressed_bytes(piece: Piece) -> float:
    if piece.compression == "none":
        return (piece.num_bytes if piece.end is None else piece.end) - piece.start
    with storage.open_to_read(piece.path) as stored:
        start = stored.read(MEASURED_BYTES)
    return piece.num_bytes / len(start) * _num_decompressed(start, piece.compression)


def _num_decompressed(start: bytes, compression: str) -> int:
    """Return how many bytes the start of a compressed file expands to."""
    num_bytes = 0
    try:
        file = cast(io.BufferedReader, decompress(io.BytesIO(start), compression))
        while data := file.read1(_CHUNK_BYTES):
            num_bytes += len(data)
    except DAMAGE:  # cut here, in the middle of a frame
        return num_bytes + _HELD_BACK.get(compression, 0)
    return num_bytes
