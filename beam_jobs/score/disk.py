"""How much disk scores take, before a teacher is loaded; no torch."""

from __future__ import annotations

from beam_jobs import storage
from schemas.manifest import Manifest
from schemas.sidecar import sidecar_name

_LOSS_BYTES, _START_BYTES = 2, 4
_HEADER_BYTES, _RECORD_BYTES = 400, 600
"""Of a sidecar: its header of safetensors with the metadata, and its share of the manifest."""


def estimate_disk(output: str, manifest: Manifest, teacher: str) -> int:
    """Return how many bytes a job will add to a dataset's disk, to a percent; no sidecar twice.

    Args:
        output: the dataset's folder.
        manifest: the dataset's.
        teacher: fingerprint of the `TeacherRule`.
    """
    there = storage.list_folder(output)
    return sum(
        _LOSS_BYTES * shard.num_teacher_tokens
        + _START_BYTES * (shard.num_documents + 1)
        + _HEADER_BYTES
        + _RECORD_BYTES
        for shard in manifest.shards
        if not there.get(sidecar_name(shard.file, teacher))
    )
