"""Scoring's input from a shard, and its output next to it; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.chosen_documents import ChosenDocuments, Kept
from pipeline.dataset.files import Dataset
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.entries import require_sound
from schemas.distribution_rule import DistributionRule
from schemas.document import decode_document
from schemas.errors import RESTORE, DamagedShardError
from schemas.index import ShardIndex
from schemas.manifest import ShardRecord
from schemas.sidecar import (
    ShardLosses,
    SidecarRecord,
    decode_sidecar,
    encode_sidecar,
    sidecar_name,
    to_fp16,
)
from schemas.stored_distributions import TopTokens, position_starts


@dataclass(frozen=True)
class DocumentTokens:
    """The teacher tokens of D documents, laid end to end.

    Document d owns tokens starts[d]:starts[d + 1]. `learned` marks a chat's tokens that cover
    learned bytes.
    """

    input_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    learned: NDArray[np.bool_] | None = None

    @cached_property
    def position_starts(self) -> NDArray[np.int64]:
        """Starts of the documents' positions, [D + 1]."""
        return position_starts(self.starts)

    def unlearned_positions(self) -> NDArray[np.int64]:
        """Return the positions at which no learned token is expected."""
        assert self.learned is not None
        is_learned = np.zeros(int(self.position_starts[-1]), np.bool_)
        shift = np.repeat((self.position_starts - self.starts)[:-1], np.diff(self.starts))
        is_learned[np.arange(len(self.learned)) + shift] = self.learned
        return np.flatnonzero(~is_learned)


@dataclass(frozen=True, eq=False)
class ShardToScore:
    """A teacher's view of a shard, removed documents included: stored losses outlive them.

    Documents in `kept` are scored, in `pieces`.
    """

    dataset: Dataset
    number: int
    index: ShardIndex
    kept: Kept
    pieces: Pieces

    @classmethod
    def open(cls, documents: ChosenDocuments, number: int, context: ContextRule) -> ShardToScore:
        """Read a shard's index; DamagedShardError if it is missing or differs from the manifest."""
        index, kept = documents.read(number, with_removed=True, with_names=True)
        pieces = context.pieces(index)
        if kept is not None:
            pieces = pieces.of_documents(kept)
        return cls(documents.dataset, number, index, kept, pieces)

    @property
    def record(self) -> ShardRecord:
        """The manifest's."""
        return self.dataset.manifest.shards[self.number]

    @property
    def num_documents(self) -> int:
        """Documents to score."""
        return len(self.index) if self.kept is None else int(self.kept.sum())

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Each document's teacher tokens to score, [N]."""
        lengths = self.index.num_teacher_tokens
        return lengths if self.kept is None else np.where(self.kept, lengths, 0)

    def read_tokens(self, wanted: Kept = None) -> DocumentTokens:
        """Return wanted documents' teacher tokens; None means all to score.

        DamagedShardError if the tar is missing or doesn't fit the index; DamagedSampleError if a
        sample is altered.
        """
        chosen = self.kept if wanted is None else wanted
        documents = None if chosen is None else np.flatnonzero(chosen).tolist()
        expected = self.lengths if chosen is None else np.where(chosen, self.lengths, 0)
        lengths = np.zeros_like(expected)
        parts = [np.empty(0, np.int64)]
        is_chats = self.dataset.manifest.chats is not None
        learned = [np.empty(0, np.bool_)]
        for place, sample in self.dataset.samples(
            self.number, self.index, documents=documents, with_removed=True
        ):
            document = decode_document(sample)
            parts.append(document.teacher.input_ids.astype(np.int64))
            lengths[place] = len(parts[-1])
            if document.chat is not None:
                learned.append(document.chat.teacher.is_learned(len(parts[-1])))
        if not np.array_equal(lengths, expected):
            raise DamagedShardError(
                f"the samples of {self.dataset.shard(self.number).url} don't have the numbers "
                f"of teacher tokens in its index: {RESTORE}"
            )
        of_tokens = np.concatenate(learned) if is_chats else None
        return DocumentTokens(np.concatenate(parts), np.append(0, np.cumsum(lengths)), of_tokens)

    def make_sidecar(
        self,
        losses: NDArray[np.float32],
        teacher: str,
        top: TopTokens | None,
        learned: NDArray[np.bool_] | None = None,
    ) -> tuple[bytes, SidecarRecord]:
        """Return the shard's sidecar and its record.

        `losses`, [M], are in nats, NaN without a context; `teacher` is its rule's fingerprint. With
        `learned`, [M], only those tokens' losses are stored.
        """
        starts = np.append(0, np.cumsum(self.lengths))
        entries = None if top is None else top.pack(starts)
        if learned is not None:
            losses = np.where(learned, losses, np.float32(np.nan))
        about = teacher, self.record.sha256, entries, learned
        stored = ShardLosses(to_fp16(losses), starts, *about)
        data = encode_sidecar(stored)
        return data, self.describe_sidecar(data, stored)

    def accept_sidecar(
        self, data: bytes, teacher: str, rule: DistributionRule | None
    ) -> SidecarRecord | None:
        """Return the record of an earlier run's sidecar; None unless it fits.

        It must be of this shard and teacher, with every scored token and sound entries of `rule`.
        """
        try:
            name = sidecar_name(self.record.file, teacher)
            stored = decode_sidecar(data, at=name)
            if stored.entries is not None:
                require_sound(stored.entries, at=name)
        except ValueError:
            return None
        if (stored.entries and stored.entries.rule) != rule:
            return None
        is_ours = (stored.teacher, stored.shard_sha256) == (teacher, self.record.sha256)
        if not is_ours or not np.array_equal(np.diff(stored.starts), self.lengths):
            return None
        return self.describe_sidecar(data, stored)

    def describe_sidecar(self, data: bytes, stored: ShardLosses) -> SidecarRecord:
        """Return a sidecar's record."""
        known = stored.losses[~np.isnan(stored.losses)].astype(np.float64)
        return SidecarRecord(
            file=sidecar_name(self.record.file, stored.teacher),
            num_bytes=len(data),
            sha256=sha256(data).hexdigest(),
            shard=self.record.file,
            num_tokens=len(stored.losses) if stored.learned is None else int(stored.learned.sum()),
            num_losses=len(known),
            loss_sum=float(known.sum()),
            num_split_documents=self.pieces.num_split_documents,
            context_sha256=self.pieces.context_sha256,
            entries=None if stored.entries is None else stored.entries.describe(),
        )
