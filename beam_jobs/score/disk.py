"""How much disk scores take, before a teacher is loaded; no torch."""

from __future__ import annotations

import logging

from beam_jobs import storage
from beam_jobs.errors import OptionsError
from beam_jobs.shortages import free_bytes
from pipeline.drawing.formatting import format_bytes
from schemas.manifest import Manifest
from schemas.sidecar import sidecar_name

_LOSS_BYTES, _START_BYTES = 2, 4
_HEADER_BYTES, _RECORD_BYTES = 400, 600
"""Of a sidecar: its header of safetensors with the metadata, and its share of the manifest."""

logger = logging.getLogger(__name__)


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
    if not storage.is_local(output):
        return
    room = free_bytes(output)
    if room < need:
        raise OptionsError(
            f"{output} has {format_bytes(room)} of free disk, and the scores will take "
            f"{format_bytes(need)} there; free some, or copy the dataset to a larger disk"
        )
    if room < 1.05 * need:
        logger.warning(
            "%s has %s of free disk, and the scores will take %s there; it may run out of space",
            output, format_bytes(room), format_bytes(need),
        )  # fmt: skip
