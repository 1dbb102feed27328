"""Scores of documents: summaries of a teacher's stored losses, and ranks.

They are read from the tables next to the sidecars. If a table is missing or of another version, the
same numbers are computed from the sidecar's losses.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled
from pipeline.dataset.files import Dataset
from pipeline.dataset.score_files import (
    SCORE_AGAIN,
    ScoreFiles,
    find_scores,
    read_sidecar,
    scores_of,
)
from schemas.document_score_table import (
    COLUMN_VERSIONS,
    FIRST_TOKENS,
    STORED_COLUMNS,
    WINDOW_TOKENS,
    DocumentScores,
    decode_document_scores,
    document_scores_name,
    encode_document_scores,
)
from schemas.errors import DamagedShardError, SchemaVersionError
from schemas.index import ShardIndex
from schemas.sidecar import LARGEST_LOSS, ShardLosses

logger = logging.getLogger(__name__)

SCORE_COLUMNS = (*STORED_COLUMNS, "rank", "bits_per_byte_rank")
"""Columns that conditions know of each of a dataset's scores; ranks are not stored."""

_RANKS = frozenset({"rank", "bits_per_byte_rank"})
_HALVES = 1 << 15
"""Numbers in half precision that are not negative: documents that differ by less are equal."""
_OCTAVES = 33


class CostRanks:
    """Documents' ranks by cost, among all scored documents of a dataset."""

    def __init__(self, parts: Iterable[tuple[NDArray[np.float32], NDArray[np.int64]]]) -> None:
        """Count documents and bytes, by bits per byte, float32 [N], and bytes of text, int64 [N].

        Documents without bits per byte are left out.
        """
        num_bytes = np.zeros(_HALVES, np.int64)
        num_documents = np.zeros((_OCTAVES, _HALVES), np.int64)
        for bits, lengths in parts:
            known = ~np.isnan(bits)
            halves = _halves(bits[known])
            np.add.at(num_bytes, halves, lengths[known])
            np.add.at(num_documents, (_octaves(lengths[known]), halves), 1)
        bytes_up_to, up_to = np.cumsum(num_bytes), np.cumsum(num_documents, axis=1)
        self._of_bytes = bytes_up_to / max(1, bytes_up_to[-1])
        self._of_similar = (up_to - num_documents / 2) / np.maximum(1, up_to[:, -1:])

    def by_bytes(self, bits_per_byte: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return each of N documents' share of bytes in documents that are at most as costly."""
        known = ~np.isnan(bits_per_byte)
        return np.where(known, self._of_bytes[_halves(bits_per_byte)], np.nan)

    def among_similar(
        self, bits_per_byte: NDArray[np.float32], num_text_bytes: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return each of N documents' share of cheaper documents among those of similar length.

        Lengths are similar if they have equally many binary digits. Documents with the same bits
        per byte, itself included, count half.
        """
        known = ~np.isnan(bits_per_byte)
        places = _octaves(num_text_bytes), _halves(bits_per_byte)
        return np.where(known, self._of_similar[places], np.nan)


@dataclass(frozen=True)
class ScoredDataset:
    """A teacher's scores of all documents of a dataset, at a generation; see `scores_of`."""

    dataset: Dataset
    files: ScoreFiles

    @property
    def name(self) -> str:
        """The first digits of the teacher's fingerprint: its permanent name in conditions."""
        return self.files.manifest.rule.fingerprint[:16]

    def digest(self, columns: Iterable[str]) -> str:
        """Return 64 hex digits; equal digests mean equal columns of every document.

        Plans and checkpoints keep them, so other columns must not change them.
        """
        stored = {"bits_per_byte" if name in _RANKS else name for name in columns}
        changed = {name: COLUMN_VERSIONS[name] for name in stored if COLUMN_VERSIONS[name] > 1}
        sidecars = [record.sha256 for record in self.files.manifest.sidecars]
        named = json.dumps([changed or 1, *sidecars], sort_keys=True)
        return sha256(named.encode()).hexdigest()

    @cached_property
    def ranks(self) -> CostRanks:
        """Ranks among all documents in the shards, read once.

        Removed ones count, so a removal changes no other document's rank.

        Raises:
            DatasetError: a table or an index is damaged.
        """

        def read(shard_index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            values = self.read(shard_index, ["bits_per_byte", "num_text_bytes"])
            return values["bits_per_byte"], values["num_text_bytes"]

        return CostRanks(self.dataset.map_shards(read))

    def read(
        self, shard_index: int, names: Sequence[str], index: ShardIndex | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return some of `SCORE_COLUMNS` and `num_text_bytes` of a shard's N documents, by name.

        Missing floats are NaN; bytes are int64. A given `index` needs no names.

        Raises:
            DatasetError: the table, or the sidecar it is made from, is damaged.
        """
        wanted = {name for name in names if name not in _RANKS}
        if len(wanted) < len(names):
            wanted |= {"bits_per_byte", "num_text_bytes"}
        values = dict(self._read_stored(shard_index, sorted(wanted), index))
        if "rank" in names:
            values["rank"] = self.ranks.by_bytes(values["bits_per_byte"])
        if "bits_per_byte_rank" in names:
            values["bits_per_byte_rank"] = self.ranks.among_similar(
                values["bits_per_byte"], values["num_text_bytes"]
            )
        return {name: values[name] for name in names}

    def read_ranks(self, names: Iterable[str]) -> None:
        """Read the ranks if columns need them, before threads ask for them at once."""
        if not _RANKS.isdisjoint(names):
            _ = self.ranks

    def lacks(self, shard_index: int, index: ShardIndex) -> NDArray[np.bool_]:
        """Return which documents of a shard were not scored, bool [N].

        Documents without bits per byte, for want of text or context, count as scored.
        """
        bits = self.read(shard_index, ["bits_per_byte"], index)["bits_per_byte"]
        missing: NDArray[np.bool_] = np.isnan(bits)
        learned_only = self.files.manifest.rule.learned_only
        num_bytes, _ = _scored(index, learned_only=learned_only)
        missing &= (num_bytes > 0) & (index.num_teacher_tokens > 1)
        return missing

    def _read_stored(
        self, shard_index: int, names: Sequence[str], index: ShardIndex | None
    ) -> Mapping[str, NDArray[Any]]:
        """Return columns from the shard's table, or made from its losses and index."""
        record = self.files.manifest.sidecars[shard_index]
        name = document_scores_name(record.file)
        at = f"{self.dataset.location}/{name}"
        try:
            data = self.dataset.read_file(name)
            if record.documents_sha256 not in (None, sha256(data).hexdigest()):
                raise DamagedShardError(
                    f"{at} is not the table that {self.files.path} names (SHA-256 differs): delete "
                    f"it and {SCORE_AGAIN}, which makes it from the losses"
                )
            return decode_document_scores(data, names, sidecar_sha256=record.sha256, at=at)
        except (FileNotFoundError, SchemaVersionError) as error:
            logger.info("%s: its numbers are made from the losses", error)
        shard = self.dataset.manifest.shards[shard_index]
        index = index or self.dataset.read_index(shard_index)
        losses = read_sidecar(self.files, record, shard)
        num_bytes, _ = _scored(index, learned_only=losses.learned is not None)
        return {**vars(summarise_losses(losses, index)), "num_text_bytes": num_bytes}


def open_scored_documents(name: str, dataset: Dataset) -> ScoredDataset:
    """Return the scores of a dataset's documents by their name, see `find_scores`.

    Raises:
        DatasetError: none or several of that name, with those available; or scores of another
            generation, or of some of the shards.
    """
    return ScoredDataset(dataset, scores_of(find_scores(name, dataset.location), dataset))


def make_document_scores(losses: ShardLosses, index: ShardIndex, sidecar_sha256: str) -> bytes:
    """Encode the table for a sidecar; the index has names."""
    return encode_document_scores(
        summarise_losses(losses, index),
        document_id=index.document_id,
        num_text_bytes=_scored(index, learned_only=losses.learned is not None)[0],
        sidecar_sha256=sidecar_sha256,
    )


def summarise_losses(losses: ShardLosses, index: ShardIndex) -> DocumentScores:
    """Summarise a shard's losses by document.

    Sums are exact: fp16 losses are multiples of 2**-24, and float64 holds any sum of them below
    2**29 nats.
    """
    sums = np.zeros((len(index.num_text_bytes), 6))
    _sum_losses(losses.losses.astype(np.float32), losses.starts, sums)
    found = _scored(index, learned_only=losses.learned is not None)
    num_bytes, num_tokens = (each.astype(np.float64) for each in found)
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens_per_byte = num_tokens / num_bytes
        whole, later, window = (
            np.where(sums[:, place] > 0, sums[:, place + 1] / sums[:, place], np.nan) / np.log(2)
            for place in (0, 2, 4)
        )
        bits = whole * sums[:, 0] / num_bytes
        columns = (bits, later * tokens_per_byte, window * tokens_per_byte, tokens_per_byte)
        has_text = num_bytes > 0
        return DocumentScores(
            *(np.where(has_text, column, np.nan).astype(np.float32) for column in columns)
        )


def _scored(
    index: ShardIndex, *, learned_only: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes and teacher tokens of each document that have losses, int64 [N] each."""
    if learned_only:
        return index.chats["num_learned_bytes"], index.chats["num_learned_teacher_tokens"]
    return index.num_text_bytes, index.num_teacher_tokens


@compiled
def _sum_losses(
    losses: NDArray[np.float32], starts: NDArray[np.int64], sums: NDArray[np.float64]
) -> None:
    """Write number and sum of each document's losses: all, later ones, the costliest window's."""
    for document in range(len(sums)):
        row, oldest, window = sums[document], starts[document], 0.0
        for token in range(starts[document], starts[document + 1]):
            loss = losses[token]
            if np.isnan(loss):
                continue
            row[0] += 1
            row[1] += loss
            if token - starts[document] >= FIRST_TOKENS:
                row[2] += 1
                row[3] += loss
            window += loss
            if row[0] > WINDOW_TOKENS:
                while np.isnan(losses[oldest]):
                    oldest += 1
                window -= losses[oldest]
                oldest += 1
            row[4] = min(row[0], WINDOW_TOKENS)
            # A window that is not full yet grows with each loss: the full ones are compared.
            row[5] = window if row[0] <= WINDOW_TOKENS else max(row[5], window)


def _halves(bits_per_byte: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return non-negative numbers' bits in half precision; NaN becomes 0."""
    halves = np.minimum(np.nan_to_num(bits_per_byte), LARGEST_LOSS).astype(np.float16)
    return halves.view(np.uint16).astype(np.int64)


def _octaves(num_text_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return lengths' numbers of binary digits, which are equal within an octave."""
    return np.frexp(num_text_bytes.astype(np.float64))[1].astype(np.int64)
