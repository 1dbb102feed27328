"""Losses that are known from another dataset: found by what the teacher saw, never by an id.

A document's digest is over all that a frozen teacher sees of it: its tokens, how they are cut into
pieces, and the token before each. Equal digests under one teacher are equal losses, whatever the
student, the shard or the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.cache import ListedFile, ShardCache
from pipeline.dataset.files import Dataset
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.sidecars import DocumentTokens, read_teacher_tokens
from pipeline.scoring.stored_losses import ScoreFiles, decode_listed, map_sidecar
from schemas.errors import DamagedShardError
from schemas.manifest import ShardRecord
from schemas.sidecar import SidecarRecord, decode_sidecar

_DIGEST_BYTES = 16
_DIGEST = np.dtype(f"S{_DIGEST_BYTES}")


@dataclass(frozen=True, eq=False)
class KnownDocuments:
    """K documents whose losses are stored somewhere; 24 bytes each.

    Attributes:
        digests: bytes of 16 [K], ascending, each once.
        sidecars: uint32 [K], number of the file that holds a document's losses.
        starts: uint32 [K], the first of them there.
    """

    digests: NDArray[np.bytes_] = field(default_factory=lambda: np.empty(0, _DIGEST))
    sidecars: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    starts: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.digests)

    @classmethod
    def merge(cls, parts: Sequence[KnownDocuments]) -> KnownDocuments:
        """Return the documents of all parts; of equal ones the first.

        Example:
            >>> len(KnownDocuments.merge([]))
            0
        """
        parts = [cls(), *parts]
        digests = np.concatenate([part.digests for part in parts])
        unique, first = np.unique(digests, return_index=True)
        del digests
        sidecars = np.concatenate([part.sidecars for part in parts])[first]
        return cls(unique, sidecars, np.concatenate([part.starts for part in parts])[first])

    def find(self, digests: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Return the places of documents here, int64 [N]; -1 where one is not known."""
        if not len(self):
            return np.full(len(digests), -1, np.int64)
        places = np.minimum(np.searchsorted(self.digests, digests), len(self) - 1)
        return np.where(self.digests[places] == digests, places, -1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class FoundLosses:
    """What is known of a shard's documents.

    Attributes:
        documents: bool [N], those whose losses are known.
        of_known: bool [M], their tokens.
        losses: float16 [M], nats, where they are known.
    """

    documents: NDArray[np.bool_]
    of_known: NDArray[np.bool_]
    losses: NDArray[np.float16]

    def join(self, computed: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the losses of all tokens, float32 [M]: the known ones, else the computed ones."""
        return np.where(self.of_known, self.losses, computed)


class KnownLosses:
    """Finds losses by what a teacher sees; holds the sidecars that it has read, mapped."""

    def __init__(
        self,
        documents: KnownDocuments,
        sidecars: Sequence[ListedFile],
        *,
        cache: ShardCache | None = None,
    ) -> None:
        """Take what `list_known` gave.

        Args:
            documents: by digest.
            sidecars: the files that they name by number.
            cache: for remote ones.
        """
        self._documents = documents
        self._sidecars = sidecars
        self._cache = cache
        self._open: dict[int, NDArray[np.float16]] = {}

    def find(self, tokens: DocumentTokens, pieces: Pieces, rule: ContextRule) -> FoundLosses:
        """Return what is known of some documents.

        Args:
            tokens: of the documents.
            pieces: in which they are scored.
            rule: gives the context tokens.

        Raises:
            DamagedShardError: a sidecar is missing or was altered since it was listed.

        Example:
            >>> KnownLosses(KnownDocuments(), []).find(tokens, pieces, rule).documents.any()
            False
        """
        known, starts = self._documents, tokens.starts
        losses = np.full(starts[-1], np.nan, np.float16)
        documents = np.zeros(len(starts) - 1, np.bool_)
        if not len(known):
            return FoundLosses(documents, np.zeros(len(losses), np.bool_), losses)
        places = known.find(document_digests(tokens, pieces, rule))
        documents = places >= 0
        # One sidecar after another: each is read once.
        found = np.flatnonzero(documents)
        for document in found[np.argsort(known.sidecars[places[found]], kind="stable")].tolist():
            place, first, stop = int(places[document]), starts[document], starts[document + 1]
            stored, start = self._read(int(known.sidecars[place])), int(known.starts[place])
            losses[first:stop] = stored[start : start + stop - first]
        return FoundLosses(documents, np.repeat(documents, np.diff(starts)), losses)

    def _read(self, number: int) -> NDArray[np.float16]:
        opened = self._open.get(number)
        if opened is None:
            claim = self._sidecars[number]
            data = map_sidecar(claim, self._cache)
            if sha256(data).hexdigest() != claim.sha256:
                raise DamagedShardError(
                    f"{claim.url} was altered since its losses were listed: run the same command "
                    "again"
                )
            opened = self._open[number] = decode_sidecar(data, where=claim.url).losses
        return opened


def document_digests(
    tokens: DocumentTokens, pieces: Pieces, rule: ContextRule
) -> NDArray[np.bytes_]:
    """Return 16 bytes over all that a teacher sees of each document, [N].

    Args:
        tokens: of the documents.
        pieces: in which they are scored, in the documents' order.
        rule: gives the context tokens.

    Example:
        >>> len(document_digests(tokens, rule.pieces(index), rule)) == len(index)
        True
    """
    first, continued = (rule.context_token(continues=continues) for continues in (False, True))
    before = np.where(
        pieces.continues, -1 if continued is None else continued, -1 if first is None else first
    )
    seen = np.stack([pieces.start, pieces.scored_from, pieces.stop, before], axis=1)
    ids, cuts = (
        memoryview(a.tobytes()) for a in (tokens.input_ids.astype("<i4"), seen.astype("<i8"))
    )
    bounds = np.searchsorted(pieces.document, np.arange(len(tokens.starts))).tolist()
    starts, digests = tokens.starts.tolist(), bytearray()
    for number in range(len(starts) - 1):
        start, stop = starts[number : number + 2]
        # The length first, so that tokens and cuts can't be taken for each other.
        digest = blake2b((stop - start).to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
        digest.update(ids[4 * start : 4 * stop])
        digest.update(cuts[32 * bounds[number] : 32 * bounds[number + 1]])
        digests += digest.digest()
    return np.frombuffer(bytes(digests), _DIGEST)


def scored_shards(dataset: Dataset, scores: ScoreFiles) -> Iterator[tuple[int, SidecarRecord]]:
    """Yield the shards of a dataset that were scored, with their sidecars.

    Scores of an earlier generation hold its shards, those of a later one hold more.
    """
    numbers = {shard.file: number for number, shard in enumerate(dataset.manifest.shards)}
    for record in scores.manifest.sidecars:
        if record.shard in numbers:
            yield numbers[record.shard], record


def list_known(
    dataset: Dataset, scores: ScoreFiles, shard_index: int, record: SidecarRecord, *, sidecar: int
) -> KnownDocuments:
    """Return the documents of a shard whose losses are stored.

    Args:
        dataset: that was scored.
        scores: by a teacher.
        shard_index: the shard.
        record: of its sidecar.
        sidecar: number by which it will be named.

    Raises:
        DamagedShardError: the shard or its sidecar is missing, cut or altered.
        ForeignLossesError: the sidecar is of another shard.
    """
    shard: ShardRecord = dataset.manifest.shards[shard_index]
    stored = decode_listed(map_sidecar(scores.sidecar(record)), record, scores, shard)
    index = dataset.read_index(shard_index, with_names=True)
    lengths = index.num_teacher_tokens
    kept = (np.diff(stored.starts) == lengths) & (lengths > 0)
    tokens = read_teacher_tokens(dataset, shard_index, index, kept=kept)
    rule = ContextRule.from_json(scores.manifest.rule.context)
    digests = document_digests(tokens, rule.pieces(index).of_documents(kept), rule)
    places = np.flatnonzero(kept)
    return KnownDocuments(
        digests[places],
        np.full(len(places), sidecar, np.uint32),
        stored.starts[places].astype(np.uint32),
    )
