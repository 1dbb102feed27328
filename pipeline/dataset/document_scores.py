"""Scores of documents: summaries of a teacher's stored losses, and ranks.

Missing tables, or those of another version, are recomputed from the losses.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Columns of scores in conditions; ranks are not stored."""

_RANKS = frozenset({"rank", "bits_per_byte_rank"})
_HALVES = 1 << 15
"""Non-negative numbers in half precision; smaller differences count as equal."""
_OCTAVES = 33


class CostRanks:
    """Documents' ranks by cost, among a dataset's scored ones."""

    def __init__(self, parts: Iterable[tuple[NDArray[np.float32], NDArray[np.int64]]]) -> None:
        """Take parts: bits per byte, float32 [N], NaN for unknown, and text bytes, int64 [N]."""
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
        """Return, for each document, the share of bytes in documents that cost no more."""
        known = ~np.isnan(bits_per_byte)
        return np.where(known, self._of_bytes[_halves(bits_per_byte)], np.nan)

    def among_similar(
        self, bits_per_byte: NDArray[np.float32], num_text_bytes: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return, for each document, the share of cheaper ones of similar length.

        Lengths are similar if they have equally many binary digits; equal costs count half.
        """
        known = ~np.isnan(bits_per_byte)
        places = _octaves(num_text_bytes), _halves(bits_per_byte)
        return np.where(known, self._of_similar[places], np.nan)


@dataclass(frozen=True)
class ScoredDataset:
    """A teacher's scores of all documents of a dataset."""

    dataset: Dataset
    files: ScoreFiles

    @property
    def name(self) -> str:
        """The teacher's name in conditions: its fingerprint's first digits."""
        return self.files.manifest.rule.fingerprint[:16]

    def digest(self, columns: Iterable[str]) -> str:
        """Return 64 hex digits; equal ones mean equal columns of every document.

        Plans and checkpoints keep them.
        """
        stored = {"bits_per_byte" if name in _RANKS else name for name in columns}
        changed = {name: COLUMN_VERSIONS[name] for name in stored if COLUMN_VERSIONS[name] > 1}
        sidecars = [record.sha256 for record in self.files.manifest.sidecars]
        named = json.dumps([changed or 1, *sidecars], sort_keys=True)
        return sha256(named.encode()).hexdigest()

    @cached_property
    def ranks(self) -> CostRanks:
        """Ranks among all documents in the shards, removed ones included.

        So a removal changes no other's rank.
        """

        def read(shard_index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            values = self.read(shard_index, ["bits_per_byte", "num_text_bytes"])
            return values["bits_per_byte"], values["num_text_bytes"]

        return CostRanks(self.dataset.map_shards(read))

    def read(
        self, shard_index: int, names: Sequence[str], index: ShardIndex | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return columns of a shard's N documents by name: `SCORE_COLUMNS` and `num_text_bytes`.

        Missing floats are NaN. DatasetError for a damaged table or sidecar.
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
        """Read the ranks, if needed, before threads do at once."""
        if not _RANKS.isdisjoint(names):
            _ = self.ranks

    def lacks(self, shard_index: int, index: ShardIndex) -> NDArray[np.bool_]:
        """Return which documents of a shard weren't scored, bool [N].

        Those without bits per byte for want of text or context count as scored.
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


def open_scored_documents(
    name: str, dataset: Dataset, choose: Callable[[str], str] = "{}".format
) -> ScoredDataset:
    """Find scores of a dataset's documents, as `find_scores` and `scores_of` do."""
    found = find_scores(name, dataset.location, choose=choose)
    return ScoredDataset(dataset, scores_of(found, dataset))


def make_document_scores(losses: ShardLosses, index: ShardIndex, sidecar_sha256: str) -> bytes:
    """Encode a sidecar's table; the index has names."""
    return encode_document_scores(
        summarise_losses(losses, index),
        document_id=index.document_id,
        num_text_bytes=_scored(index, learned_only=losses.learned is not None)[0],
        sidecar_sha256=sidecar_sha256,
    )


def summarise_losses(losses: ShardLosses, index: ShardIndex) -> DocumentScores:
    """Summarise a shard's losses by document.

    Sums are exact: fp16 losses are multiples of 2**-24, and float64 holds sums below 2**29 nats.
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
    """Bytes and teacher tokens with losses of each document."""
    if learned_only:
        return index.chats["num_learned_bytes"], index.chats["num_learned_teacher_tokens"]
    return index.num_text_bytes, index.num_teacher_tokens


@compiled
def _sum_losses(
    losses: NDArray[np.float32], starts: NDArray[np.int64], sums: NDArray[np.float64]
) -> None:
    """Write number and sum of losses: all, later ones, the costliest window's."""
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
            # A window grows until it is full; only full ones are compared.
            row[5] = window if row[0] <= WINDOW_TOKENS else max(row[5], window)


def _halves(bits_per_byte: NDArray[np.float32]) -> NDArray[np.int64]:
    """Bits in half precision; NaN becomes 0."""
    halves = np.minimum(np.nan_to_num(bits_per_byte), LARGEST_LOSS).astype(np.float16)
    return halves.view(np.uint16).astype(np.int64)


def _octaves(num_text_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of binary digits."""
    return np.frexp(num_text_bytes.astype(np.float64))[1].astype(np.int64)
