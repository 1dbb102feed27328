"""How much disk scores take, before a teacher is loaded; no torch."""

from __future__ import annotations

from beam_jobs import storage
from beam_jobs.shortages import require_room
from pipeline.drawing.formatting import format_bytes
from schemas.manifest import Manifest
from schemas.sidecar import sidecar_name

_LOSS_BYTES, _START_BYTES = 2, 4
_HEADER_BYTES, _RECORD_BYTES = 400, 600
"""Of a sidecar: its header of safetensors with the metadata, and its share of the manifest."""


def sidecar_bytes(num_tokens: int, num_documents: int) -> int:
    """Return about how many bytes a shard's scores have, sidecar and record.

    Args:
        num_tokens: the shard's teacher tokens.
        num_documents: in the shard.

    Example:
        >>> sidecar_bytes(25_000_000, 50_000)
        50201004
    """
    return (
        _LOSS_BYTES * num_tokens
        + _START_BYTES * (num_documents + 1)
        + _HEADER_BYTES
        + _RECORD_BYTES
    )


def estimate_disk(output: str, manifest: Manifest, teacher: str) -> int:
    """Return about how many bytes a job will add to a dataset's disk, less sidecars there already.

    Args:
        output: the dataset's folder.
        manifest: the dataset's.
        teacher: fingerprint of the `TeacherRule`.
    """
    there = storage.list_folder(output)
    return sum(
        sidecar_bytes(shard.num_teacher_tokens, shard.num_documents)
        for shard in manifest.shards
        if not there.get(sidecar_name(shard.file, teacher))
    )


def require_disk(output: str, need: int) -> None:
    """Check that a local dataset's disk has room for its scores, whose size is known to a percent.

    Raises:
        OptionsError: it has not.
    """
    require_room(
        output,
        need,
        f"{output} has {{room}} of free disk, and the scores will take {format_bytes(need)} there",
        remedy="free some, or copy the dataset to a larger disk",
        ample=1.05,
    )
