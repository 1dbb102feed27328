"""What scoring reads of a shard, and what it leaves beside it; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from pipeline.dataset.selection import Kept
from pipeline.scoring.contexts import Pieces
from schemas.document import decode_document
from schemas.errors import DamagedShardError
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


@dataclass(frozen=True)
class DocumentTokens:
    """The teacher tokens of D documents, laid end to end.

    Attributes:
        input_ids: int64 [M].
        starts: int64 [D + 1]; document d owns tokens starts[d]:starts[d + 1].
    """

    input_ids: NDArray[np.int64]
    starts: NDArray[np.int64]


def read_teacher_tokens(
    dataset: Dataset, shard_index: int, index: ShardIndex, *, kept: Kept = None
) -> DocumentTokens:
    """Return the teacher tokens of a shard's documents, each verified against the index.

    Removed ones too: what is stored beside a shard doesn't depend on them.

    Args:
        dataset: the dataset.
        shard_index: its shard.
        index: of the shard, with names.
        kept: the documents to read; the others get no tokens.

    Raises:
        DamagedShardError: the tar is missing or cut.
        DamagedSampleError: a sample is altered.

    Example:
        >>> read_teacher_tokens(dataset, 0, dataset.read_index(0, with_names=True)).starts[:3]
        array([  0, 152, 331])
    """
    parts, lengths = [np.empty(0, np.int64)], np.zeros(len(index), np.int64)
    documents = None if kept is None else np.flatnonzero(kept).tolist()
    for place, sample in dataset.samples(
        shard_index, index, documents=documents, with_removed=True
    ):
        parts.append(decode_document(sample).teacher.input_ids.astype(np.int64))
        lengths[place] = len(parts[-1])
    starts = np.append(0, np.cumsum(lengths))
    if not np.array_equal(lengths, scored_lengths(index, kept)):
        raise DamagedShardError(
            f"the samples of {dataset.shard(shard_index).url} have other numbers of teacher "
            "tokens than its index says: restore the shard or run beam_jobs.align again"
        )
    return DocumentTokens(np.concatenate(parts), starts)


def scored_lengths(index: ShardIndex, kept: Kept) -> NDArray[np.int64]:
    """Return the teacher tokens of each document that are scored, int64 [N].

    Args:
        index: of the shard.
        kept: the documents that are; 0 stands for the others.
    """
    lengths = index.num_teacher_tokens
    return lengths if kept is None else np.where(kept, lengths, 0)


def make_sidecar(
    losses: NDArray[np.float32],
    starts: NDArray[np.int64],
    *,
    shard_record: ShardRecord,
    pieces: Pieces,
    teacher: str,
) -> tuple[bytes, SidecarRecord]:
    """Return a shard's sidecar and what the score manifest says of it.

    Args:
        losses: float32 [M], nats; NaN where a token has no context.
        starts: int64 [D + 1], as in `DocumentTokens`.
        shard_record: of the shard that was scored.
        pieces: in which.
        teacher: fingerprint of the `TeacherRule`.
    """
    stored = ShardLosses(to_fp16(losses), starts, teacher, shard_record.sha256)
    data = encode_sidecar(stored)
    return data, describe_sidecar(data, stored, shard_record=shard_record, pieces=pieces)


def accept_sidecar(
    data: bytes,
    *,
    shard_record: ShardRecord,
    index: ShardIndex,
    pieces: Pieces,
    teacher: str,
    kept: Kept = None,
) -> SidecarRecord | None:
    """Return the record of a sidecar that an earlier run has left, None where it is of no use.

    It must decode, belong to this shard's bytes and this teacher, and have a place for every token
    of the documents that are scored.
    """
    file = sidecar_name(shard_record.file, teacher)
    try:
        stored = decode_sidecar(data, where=file)
    except ValueError:
        return None
    if (stored.teacher, stored.shard_sha256) != (teacher, shard_record.sha256):
        return None
    if not np.array_equal(np.diff(stored.starts), scored_lengths(index, kept)):
        return None
    return describe_sidecar(data, stored, shard_record=shard_record, pieces=pieces)


def describe_sidecar(
    data: bytes, stored: ShardLosses, *, shard_record: ShardRecord, pieces: Pieces
) -> SidecarRecord:
    """Return what the score manifest says of a sidecar."""
    known = stored.losses[~np.isnan(stored.losses)].astype(np.float64)
    return SidecarRecord(
        file=sidecar_name(shard_record.file, stored.teacher),
        num_bytes=len(data),
        sha256=sha256(data).hexdigest(),
        shard=shard_record.file,
        num_tokens=len(stored.losses),
        num_losses=len(known),
        loss_sum=float(known.sum()),
        num_split_documents=pieces.num_split_documents,
        context_sha256=pieces.context_sha256,
    )
