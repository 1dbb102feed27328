"""Find losses known from another dataset by what the teacher saw, never by an id.

A document's digest covers its tokens, their pieces, the token before each, and which tokens of a
chat are learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.cache import ListedFile, ShardCache
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import Dataset
from pipeline.dataset.score_files import ScoreFiles, open_sidecar, read_sidecar
from pipeline.recent import Recent
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.entries import copy_entries
from pipeline.scoring.sidecars import DocumentTokens, ShardToScore
from schemas.sidecar import ShardLosses, SidecarRecord
from schemas.stored_distributions import TopTokens

_DIGEST_BYTES = 16
_MOST_OPEN = 64  # each keeps a file descriptor
_DIGEST = np.dtype(f"S{_DIGEST_BYTES}")


@dataclass(frozen=True, eq=False)
class ReusableDocuments:
    """K documents whose losses are stored somewhere; 24 bytes each.

    `digests` ascend; `places`, [K, 2], are a file's number and a first loss there.
    """

    digests: NDArray[np.bytes_] = field(default_factory=lambda: np.empty(0, _DIGEST))
    places: NDArray[np.uint32] = field(default_factory=lambda: np.empty((0, 2), np.uint32))

    def __len__(self) -> int:
        return len(self.digests)

    @classmethod
    def merge(cls, parts: Sequence[ReusableDocuments]) -> ReusableDocuments:
        """Merge parts; of equal documents the first stays."""
        parts = [cls(), *parts]
        digests = np.concatenate([part.digests for part in parts])
        unique, first = np.unique(digests, return_index=True)
        del digests
        return cls(unique, np.concatenate([part.places for part in parts])[first])

    def find(self, digests: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Return documents' numbers here, [N], -1 for unknown ones."""
        if not len(self):
            return np.full(len(digests), -1, np.int64)
        found = np.minimum(np.searchsorted(self.digests, digests), len(self) - 1)
        return np.where(self.digests[found] == digests, found, -1).astype(np.int64)


@dataclass(frozen=True)
class ScoredShard:
    """A dataset's shard with a teacher's stored losses."""

    dataset: Dataset
    number: int
    scores: ScoreFiles
    record: SidecarRecord

    @property
    def sidecar(self) -> ListedFile:
        """The file."""
        return self.scores.sidecar(self.record)

    def list_documents(self, file: int) -> ReusableDocuments:
        """Return the documents with losses in the sidecar, as file number `file`.

        DamagedShardError or ForeignLossesError if shard and sidecar are unusable.
        """
        rule = ContextRule.from_json(self.scores.manifest.rule.context)
        shard = ShardToScore.open(select_documents(self.dataset), self.number, rule)
        stored = read_sidecar(self.scores, self.record, shard.record)
        kept = (np.diff(stored.starts) == shard.lengths) & (shard.lengths > 0)
        digests = document_digests(shard.read_tokens(kept), shard.pieces.of_documents(kept), rule)
        places = np.stack([np.full(len(kept), file), stored.starts[:-1]], axis=1).astype(np.uint32)
        return ReusableDocuments(digests[kept], places[kept])


@dataclass(frozen=True, eq=False)
class ReusableLosses:
    """Finds losses by what a teacher sees; keeps some sidecars mapped."""

    documents: ReusableDocuments
    sidecars: Sequence[ListedFile]
    cache: ShardCache | None = None
    _open: Recent[int, ShardLosses] = field(default_factory=lambda: Recent(_MOST_OPEN), init=False)

    def find(self, tokens: DocumentTokens, pieces: Pieces, rule: ContextRule) -> NDArray[np.int64]:
        """Return documents' numbers for `read`, [N], -1 for unknown ones."""
        if not len(self.documents):  # then no digest is needed
            return np.full(len(tokens.starts) - 1, -1, np.int64)
        return self.documents.find(document_digests(tokens, pieces, rule))

    def read(self, found: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the known losses of documents' tokens, [M], nats; NaN for the rest.

        `starts` is `DocumentTokens`'. DamagedShardError if a sidecar is missing or was altered.
        """
        losses = np.full(starts[-1], np.nan, np.float32)
        for document, number, first in self._known(found):
            stored = self._sidecar(number)
            start, stop = starts[document : document + 2]
            losses[start:stop] = stored.losses[first : first + stop - start]
        return losses

    def read_top(self, found: NDArray[np.int64], tokens: DocumentTokens, top: TopTokens) -> None:
        """Fill the known documents' entries, stored by the same rule, into `top`."""
        for document, number, first in self._known(found):
            stored = self._sidecar(number)
            own = slice(*tokens.position_starts[document : document + 2].tolist())
            # Several documents may start there; the last one has the tokens.
            there = int(np.searchsorted(stored.starts, first, "right")) - 1
            assert stored.entries is not None, "the rule is compared before"
            copy_entries(stored.entries, there, top, own, at=self.sidecars[number].url)

    def _known(self, found: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Yield known documents, their sidecar's number, and first loss there."""
        known = np.flatnonzero(found >= 0)
        files, firsts = self.documents.places[found[known]].T.astype(np.int64)
        # One sidecar after another: each is read once.
        for place in np.argsort(files, kind="stable").tolist():
            yield int(known[place]), int(files[place]), int(firsts[place])

    def _sidecar(self, number: int) -> ShardLosses:
        return self._open.get(number, lambda: open_sidecar(self.sidecars[number], self.cache))


def document_digests(
    tokens: DocumentTokens, pieces: Pieces, rule: ContextRule
) -> NDArray[np.bytes_]:
    """Return 16 bytes over all that a teacher sees of each document, [N]."""
    first, continued = (
        -1 if token is None else token for token in (rule.first_token_id, rule.continued_token_id)
    )
    before = np.where(pieces.continues, continued, first)
    seen = np.stack([pieces.start, pieces.stop, before], axis=1).astype("<i8")
    ids, cuts = memoryview(tokens.input_ids.astype("<i4").tobytes()), memoryview(seen.tobytes())
    bounds = np.searchsorted(pieces.document, np.arange(len(tokens.starts))) * seen[:1].nbytes
    starts, digests = tokens.starts.tolist(), bytearray()
    learned = tokens.learned
    for (start, stop), (cut, end) in zip(pairwise(starts), pairwise(bounds.tolist()), strict=True):
        # The length first, so tokens and cuts can't be taken for each other.
        digest = blake2b((stop - start).to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
        digest.update(ids[4 * start : 4 * stop])
        digest.update(cuts[cut:end])
        if learned is not None:
            digest.update(learned[start:stop].tobytes())
        digests += digest.digest()
    return np.frombuffer(bytes(digests), _DIGEST)


def scored_shards(dataset: Dataset, scores: ScoreFiles) -> list[ScoredShard]:
    """Return a dataset's shards that a teacher has scored, also in another generation."""
    numbers = {shard.file: number for number, shard in enumerate(dataset.manifest.shards)}
    return [
        ScoredShard(dataset, numbers[record.shard], scores, record)
        for record in scores.manifest.sidecars
        if record.shard in numbers
    ]
