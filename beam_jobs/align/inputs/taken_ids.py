"""Ids that a dataset has already, which new documents can't take."""

from collections.abc import Iterator
from hashlib import sha256

import msgspec

from beam_jobs import storage
from beam_jobs.align.inputs.parts import InputFile, InputPart, plan_tasks
from schemas.errors import DamagedShardError
from schemas.index import decode_ids
from schemas.manifest import Manifest

TAKEN_IDS = "taken_ids"
"""The format of a shard's index."""


class TakenId(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The id of a document, with its place in a shard's index."""

    source: str
    position: int
    document_id: str


def plan_taken_ids(manifest: Manifest, output: str) -> list[str]:
    """Tasks that read a dataset's ids, see `plan_tasks`."""
    return plan_tasks(
        [
            InputFile(
                path=storage.join(output, shard.index_file),
                source=shard.file,
                num_bytes=shard.index_num_bytes,
                format=TAKEN_IDS,
                compression="none",
                content=shard.index_sha256,
            )
            for shard in manifest.shards
        ]
    )


def read_taken_ids(part: InputPart) -> Iterator[TakenId]:
    """Yield a shard's ids; DamagedShardError if its index isn't the manifest's."""
    path = part.file.path
    data = storage.read_bytes(path)
    if sha256(data).hexdigest() != part.file.content:
        raise DamagedShardError(
            f"{path} is not the index that the manifest names (SHA-256 differs): restore it, then "
            "run the same command again"
        )
    for position, document_id in enumerate(decode_ids(data).to_pylist()):
        yield TakenId(part.file.source, position, document_id)
