"""A manifest as it is seen through one of its views: another tokenizer on one side.

Whoever plans, scores or reads takes it for any other manifest. It is never written.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import sha256

from schemas.errors import DatasetError
from schemas.manifest import Manifest, ShardRecord, ViewFileRecord, ViewRecord
from schemas.view_file import Side


@dataclass(frozen=True, kw_only=True)
class ViewedManifest(Manifest):
    """What a dataset holds through a view.

    Attributes:
        view: through which; its files are those of `shards`, in their order.
        dataset: fingerprint of the dataset itself.
    """

    view: ViewRecord
    dataset: str

    @property
    def fingerprint(self) -> str:
        """64 hex digits over the dataset's fingerprint and the view's."""
        return seen_fingerprint(self.dataset, self.view)


def seen_fingerprint(dataset: str, view: ViewRecord) -> str:
    """Return the fingerprint of a dataset through a view.

    Args:
        dataset: its own fingerprint.
        view: with a file for each of its shards, and no others.
    """
    content = {"dataset": dataset, "view": view.fingerprint}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def view_manifest(manifest: Manifest, name: str) -> ViewedManifest:
    """Return a manifest as seen through one of its views.

    Its tokenizer of the view's side, its token counts and its statistics are the view's.

    Args:
        manifest: as the file has it.
        name: of the view.

    Raises:
        DatasetError: no view of that name, or one without a file for each shard.

    Example:
        >>> view_manifest(manifest, "qwen").teacher.source
        'Qwen/Qwen2.5-1.5B'
    """
    view = next((view for view in manifest.views if view.name == name), None)
    if view is None:
        there = ", ".join(f'"{v.name}" ({v.side}: {v.tokenizer.source})' for v in manifest.views)
        raise DatasetError(
            f'the dataset has no view "{name}": it has {there or "none"}; vocag add-teacher and '
            "vocag add-student make views"
        )
    files = find_view_files(view, manifest.shards)
    if len(files) < len(manifest.shards):
        raise DatasetError(
            f'view "{name}" has files for {len(files)} of {len(manifest.shards)} shards: the '
            f"dataset has grown since it was made; run vocag add-{view.side} again"
        )
    shards = tuple(map(partial(_count, view.side), manifest.shards, files))
    values = {entry.name: getattr(manifest, entry.name) for entry in fields(Manifest)}
    seen = {view.side: view.tokenizer, "statistics": view.statistics, "shards": shards}
    return ViewedManifest(
        **{**values, **seen}, view=replace(view, files=files), dataset=manifest.fingerprint
    )


def find_view_files(view: ViewRecord, shards: Sequence[ShardRecord]) -> tuple[ViewFileRecord, ...]:
    """Return what a view holds of some shards, in their order, as far as it is there."""
    files = {(file.shard, file.shard_sha256): file for file in view.files}
    found = [files.get((shard.file, shard.sha256)) for shard in shards]
    return tuple(file for file in found if file is not None)


def own_fingerprint(manifest: Manifest) -> str:
    """Return a dataset's own fingerprint, through whichever view its manifest is seen."""
    return manifest.dataset if isinstance(manifest, ViewedManifest) else manifest.fingerprint


def identity_of_view(manifest: Manifest) -> str | None:
    """Return the identity of the view that a manifest is seen through, None without one.

    It stays when the dataset grows, so that what was scored before is not scored again.
    """
    view = view_of(manifest)
    return None if view is None else view.identity


def view_of(manifest: Manifest) -> ViewRecord | None:
    """Return the view that a manifest is seen through, None where it is the file's own."""
    return manifest.view if isinstance(manifest, ViewedManifest) else None


def _count(side: Side, shard: ShardRecord, file: ViewFileRecord) -> ShardRecord:
    if side == "student":
        return replace(shard, num_student_tokens=file.num_tokens)
    return replace(shard, num_teacher_tokens=file.num_tokens)
