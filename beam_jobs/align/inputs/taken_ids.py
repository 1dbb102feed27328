"""Ids that a dataset has already: they pass through the shuffle, and win over new documents."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256

from beam_jobs import storage
from beam_jobs.align.inputs.pieces import TASK_BYTES, Piece
from schemas.errors import DamagedShardError
from schemas.index import decode_ids
from schemas.manifest import Manifest

TAKEN_IDS = "taken_ids"
"""The format of a piece that is a shard's index."""


@dataclass(frozen=True, slots=True)
class TakenId:
    """An id that is taken.

    Attributes:
        source: the shard that holds its document, removed or not.
        position: the document's place in the shard's index.
        document_id: the id.
    """

    source: str
    position: int
    document_id: str


def plan_taken_ids(manifest: Manifest, output: str, *, task_bytes: int = TASK_BYTES) -> list[str]:
    """Return the tasks that read a dataset's ids, as `plan_tasks` returns those of its input.

    Example:
        >>> plan_taken_ids(manifest, "aligned")  # doctest: +SKIP
        ['[{"path": "aligned/corpus-000000-of-000001.index.parquet", …}]']
    """
    tasks: list[list[Piece]] = []
    room = 0
    for shard in manifest.shards:
        if not tasks or shard.index_num_bytes > room:
            tasks.append([])
            room = task_bytes
        path = storage.join(output, shard.index_file)
        tasks[-1].append(Piece(path, shard.file, TAKEN_IDS, "none", content=shard.index_sha256))
        room -= shard.index_num_bytes
    return [json.dumps([asdict(piece) for piece in task]) for task in tasks]


def read_taken_ids(piece: Piece) -> Iterator[TakenId]:
    """Yield the ids of a shard.

    Raises:
        DamagedShardError: the index is not the one that the dataset's manifest names.
    """
    data = storage.read_bytes(piece.path)
    if sha256(data).hexdigest() != piece.content:
        raise DamagedShardError(
            f"{piece.path} is not the index that the manifest names (SHA-256 differs): restore it, "
            "then run the same command again"
        )
    for position, document_id in enumerate(decode_ids(data).to_pylist()):
        yield TakenId(piece.source, position, document_id)
