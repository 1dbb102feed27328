"""The shuffle: documents in blocks of bytes, keyed by bucket.

Beam's cost is per element, so one holds many documents. If workers share a file system, only
references pass through the runner: its shuffle would hold the corpus in RAM.
"""

import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from beam_jobs import storage
from beam_jobs.align.inputs.documents import DeadLetter, PlacedDocument
from beam_jobs.align.inputs.taken_ids import TakenId
from beam_jobs.align.options import Shuffle
from beam_jobs.resuming import BLOCKS_PREFIX
from schemas.document import document_key

Record = PlacedDocument | DeadLetter | TakenId
"""Sent to a bucket."""

BLOCK_BYTES = 8 << 20
"""A bucket's block is handed over once it is this large."""

BUFFER_BYTES = 64 << 20
"""All blocks are handed over once a reader holds this much."""

_RECORD_BYTES = 64
"""About what a record takes besides its text and id."""

_READ_BYTES = 4096
"""Small: the bytes after a block belong to other buckets."""

_INLINE, _REFERENCE = b"B", b"R"
_TAKEN_IDS, _OTHERS = b"T", b"D"
_records = msgspec.msgpack.Decoder(list[Record])


@dataclass(frozen=True)
class BlockStore:
    """Where blocks wait: the run's folder, or the runner."""

    shuffle: Shuffle
    folder: str

    def hand_over(self, blocks: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield (bucket, element) for (bucket, block)."""
        if self.shuffle == "runner":
            yield from ((bucket, _INLINE + block) for bucket, block in blocks)
            return
        name = f"{BLOCKS_PREFIX}{uuid.uuid4().hex}.bin"
        references, offset = [], 0
        with storage.open_to_write(storage.join(self.folder, name)) as file:
            for bucket, block in blocks:
                file.write(block)
                references.append((bucket, (name, offset, len(block))))
                offset += len(block)
        for bucket, reference in references:
            yield bucket, _REFERENCE + json.dumps(reference).encode()

    def fetch(self, elements: Iterable[bytes]) -> Iterator[bytes]:
        """Yield blocks in any order; FileNotFoundError if a file is gone or cut."""
        references: dict[str, list[tuple[int, int]]] = {}
        for element in elements:
            if element[:1] == _INLINE:
                yield element[1:]
            else:
                name, offset, num_bytes = json.loads(element[1:])
                references.setdefault(name, []).append((offset, num_bytes))
        for name, ranges in references.items():
            path = storage.join(self.folder, name)
            with storage.open_to_read(path, buffer_bytes=_READ_BYTES) as file:
                for offset, num_bytes in sorted(ranges):
                    file.seek(offset)
                    block = file.read(num_bytes)
                    if len(block) != num_bytes:
                        raise FileNotFoundError(
                            f"{path} holds {len(block)} of {num_bytes} bytes at {offset}: it was "
                            "cut while the job ran; run the same command again"
                        )
                    yield block


def pack_blocks(records: Iterable[Record], num_buckets: int) -> Iterator[tuple[int, bytes]]:
    """Yield (bucket, block of its records); taken ids get their own."""
    buckets: dict[int, list[Record]] = {}
    sizes: dict[int, int] = {}
    buffered = 0
    for record in records:
        bucket = int(key_of(record)[:8], 16) * num_buckets >> 32
        num_bytes = estimate_bytes(record)
        buckets.setdefault(bucket, []).append(record)
        sizes[bucket] = sizes.get(bucket, 0) + num_bytes
        buffered += num_bytes
        if sizes[bucket] >= BLOCK_BYTES:
            buffered -= sizes.pop(bucket)
            yield bucket, _pack(buckets.pop(bucket))
        elif buffered >= BUFFER_BYTES:
            yield from _drain(buckets)
            sizes.clear()
            buffered = 0
    yield from _drain(buckets)


def key_of(record: Record) -> str:
    """Sort key: that of the id, or of a dead letter's place."""
    if isinstance(record, DeadLetter):
        return document_key(f"{record.source}#{record.position}")
    return document_key(record.document_id)


def estimate_bytes(record: Record) -> int:
    """Estimate a record's bytes in a block."""
    text = record.text if isinstance(record, PlacedDocument) else b""
    return _RECORD_BYTES + len(record.document_id or "") + len(text)


def holds_taken_ids(block: bytes) -> bool:
    """Whether a block holds taken ids."""
    return block.startswith(_TAKEN_IDS)


def unpack_block(block: bytes) -> list[Record]:
    """A block's records in packed order."""
    return _records.decode(memoryview(block)[1:])


def _pack(records: list[Record]) -> bytes:
    kind = _TAKEN_IDS if isinstance(records[0], TakenId) else _OTHERS
    return kind + msgspec.msgpack.encode(records)


def _drain(buckets: dict[int, list[Record]]) -> Iterator[tuple[int, bytes]]:
    while buckets:
        bucket, records = buckets.popitem()
        yield bucket, _pack(records)
