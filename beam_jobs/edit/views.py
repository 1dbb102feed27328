"""The views of a dataset, of the documents that stay in it."""

from dataclasses import replace
from hashlib import sha256
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from beam_jobs import storage
from beam_jobs.edit.copying import copy_parts, require_same
from pipeline.dataset.files import Dataset
from schemas.manifest import Manifest, ShardRecord, ViewFileRecord, ViewRecord
from schemas.view_file import VIEW_MAGIC, view_file_names
from schemas.view_index import encode_view_index, take_view_documents
from schemas.viewed import view_manifest


def see_views(dataset: Dataset) -> list[Dataset]:
    """Return a dataset through each of its views, of those of its shards that the view has.

    These come first: a dataset grows behind them, and a view has all or some of its shards.

    Example:
        >>> [seen.view.name for seen in see_views(open_dataset("aligned"))]  # doctest: +SKIP
        ['qwen']
    """
    manifest = dataset.manifest
    known = [replace(manifest, shards=_first_shards(v, manifest)) for v in manifest.views]
    names = [view.name for view in manifest.views]
    return [
        replace(dataset, manifest=view_manifest(part, name))
        for part, name in zip(known, names, strict=True)
    ]


def copy_view(
    seen: Dataset, shard_index: int, removed: NDArray[np.int64], output: str, shard: ShardRecord
) -> ViewFileRecord:
    """Write a shard's two files of a view, less some documents; the rest is what is in the view.

    Args:
        seen: the dataset through the view.
        shard_index: number of the shard there.
        removed: places of the documents to leave out, ascending.
        output: the new dataset's folder.
        shard: the new shard.

    Raises:
        DamagedShardError: the view's files are not the manifest's.

    Example:
        >>> copy_view(seen, 0, np.array([3, 17]), "clean", shard).num_left_out
        0
    """
    assert seen.view is not None
    record = seen.view.files[shard_index]
    file, index_file = view_file_names(shard.file, seen.view.name)
    data, index = seen.view_index_bytes(shard_index), seen.read_view_index(shard_index)
    parts = [(record.num_bytes, True)]
    if len(removed):
        are_kept = np.ones(len(index), np.bool_)
        are_kept[removed] = False
        sizes = index.payload_bytes.tolist()
        parts = [(len(VIEW_MAGIC), True), *zip(sizes, are_kept.tolist(), strict=True)]
        index = take_view_documents(index, np.flatnonzero(are_kept))
        data = encode_view_index(index)
    with (
        seen.open_view_file(shard_index) as source,
        storage.open_shard_to_write(storage.join(output, file)) as sink,
    ):
        copied = copy_parts(source, sink, parts)
    require_same(copied.source_sha256, seen.view_file(shard_index), "view's file")
    with storage.open_to_write(storage.join(output, index_file)) as sink:
        sink.write(data)
    return ViewFileRecord(
        shard=shard.file,
        shard_sha256=shard.sha256,
        file=file,
        num_bytes=copied.num_bytes,
        sha256=copied.sha256,
        index_file=index_file,
        index_num_bytes=len(data),
        index_sha256=sha256(data).hexdigest(),
        num_tokens=int(index.num_tokens.sum()),
        num_left_out=len(index.left_out),
    )


def _first_shards(view: ViewRecord, manifest: Manifest) -> tuple[ShardRecord, ...]:
    there = {(file.shard, file.shard_sha256) for file in view.files}
    return tuple(takewhile(lambda s: (s.file, s.sha256) in there, manifest.shards))
