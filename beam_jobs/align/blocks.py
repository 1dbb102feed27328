"""The shuffle: documents packed into blocks of bytes, one key per bucket.

Beam's cost is per element, so an element is a block of many documents. Where workers share a file
system the blocks wait in files of the run's folder and only references to them pass through the
runner, whose in-memory shuffle would otherwise hold the corpus in RAM.
"""

import json
import mmap
import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from beam_jobs import storage
from beam_jobs.align.inputs.metadata import encode_values
from beam_jobs.align.inputs.reading import DeadLetter, PlacedDocument, Reason
from beam_jobs.align.inputs.taken_ids import TakenId
from beam_jobs.runs import BLOCKS_PREFIX
from schemas.document import document_key

Shuffle = Literal["files", "runner"]

BLOCK_BYTES = 8 << 20
"""A bucket's block is handed over once it is this large."""

BUFFER_BYTES = 64 << 20
"""All blocks are handed over once a reader holds this much."""

MOST_MAPPED_FILES = 128
"""Of so many files a bucket's blocks are mapped, and of more they are read.

A map keeps its file open, and many systems let a process have 1,024 open: a reading task has a file
of blocks, so that 64 GB of text have that many.
"""

_SMALL_BUFFER_BYTES = 4096
_INLINE, _REFERENCE = b"B", b"R"
_DOCUMENT, _DEAD_LETTER, _TAKEN_ID = 0, 1, 2
_LAYOUT = struct.Struct("<16sQQBIIII")


class Record(NamedTuple):
    """A document, dead letter or taken id on its way to its bucket; `body` is a view of its block.

    `kind` says which of them, `metadata` is what `encode_values` made of the document's, `line` is
    0 where there is none.
    """

    key: bytes
    source: bytes
    position: int
    kind: int
    document_id: bytes
    metadata: bytes
    body: memoryview
    line: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter."""
        return self.kind == _DEAD_LETTER

    @property
    def is_taken(self) -> bool:
        """Whether it is an id that the dataset has already."""
        return self.kind == _TAKEN_ID

    @property
    def order(self) -> tuple[bytes, bool, bytes, int]:
        """The order of a shard: one id together, a taken one first, then as in the input."""
        return self.key, not self.is_taken, self.source, self.position

    @property
    def place(self) -> str:
        """Where the document came from, for messages."""
        return f"{self.source.decode()}#{self.position}"

    def dead_letter(self) -> DeadLetter:
        """Return the dead letter that a reader made of this document."""
        reason, detail = json.loads(bytes(self.body))
        document_id = self.document_id.decode() or None
        line = self.line or None
        source, reason = self.source.decode(), Reason(reason)
        return DeadLetter(source, self.position, document_id, reason, detail, line)


@dataclass(frozen=True)
class BlockStore:
    """Where blocks wait between reading and aligning.

    Attributes:
        shuffle: "files" of the run's folder, or "runner": the blocks themselves are the elements.
        folder: the run's folder.
    """

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

    def fetch(self, elements: Iterable[bytes]) -> Iterator[memoryview]:
        """Yield the blocks that elements hold or refer to, in no particular order.

        Raises:
            FileNotFoundError: a block's file is gone or cut.
        """
        references: list[tuple[str, int, int]] = []
        for element in elements:
            if element[:1] == _INLINE:
                yield memoryview(element)[1:]
            else:
                references.append(tuple(json.loads(element[1:])))
        by_name: dict[str, list[tuple[int, int]]] = {}
        for name, offset, num_bytes in sorted(references):
            by_name.setdefault(name, []).append((offset, num_bytes))
        mapped = storage.is_local(self.folder) and len(by_name) <= MOST_MAPPED_FILES
        take = _map_ranges if mapped else _read_ranges
        for name, ranges in by_name.items():
            path = storage.join(self.folder, name)
            for (offset, num_bytes), block in zip(ranges, take(path, ranges), strict=True):
                if len(block) != num_bytes:
                    raise FileNotFoundError(
                        f"{path} holds {len(block)} of {num_bytes} bytes at {offset}: it was cut "
                        "while the job ran; run the same command again"
                    )
                yield block


def pack_blocks(
    outcomes: Iterable[PlacedDocument | DeadLetter | TakenId], num_buckets: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (bucket, block): what was read, packed by the bucket that it hashes to.

    Taken ids are read by themselves, so that a block holds nothing else if it holds one.

    Example:
        >>> [bucket for bucket, _ in pack_blocks([document], num_buckets=1)]
        [0]
    """
    parts: dict[int, list[bytes]] = {}
    sizes: dict[int, int] = {}
    buffered = 0
    for outcome in outcomes:
        key, packed = _pack(outcome)
        bucket = int.from_bytes(key[:4], "big") * num_buckets >> 32
        parts.setdefault(bucket, []).extend(packed)
        num_bytes = sum(map(len, packed))
        sizes[bucket] = sizes.get(bucket, 0) + num_bytes
        buffered += num_bytes
        if sizes[bucket] >= BLOCK_BYTES:
            buffered -= sizes.pop(bucket)
            yield bucket, b"".join(parts.pop(bucket))
        elif buffered >= BUFFER_BYTES:
            yield from _drain(parts)
            sizes.clear()
            buffered = 0
    yield from _drain(parts)


def holds_taken_ids(block: memoryview) -> bool:
    """Whether a block is one of taken ids."""
    kind: int = _LAYOUT.unpack_from(block)[3]
    return kind == _TAKEN_ID


def unpack_block(block: memoryview) -> Iterator[Record]:
    """Yield the records of a block in the order they were packed."""
    start, end = 0, len(block)
    while start < end:
        key, position, line, kind, *lengths = _LAYOUT.unpack_from(block, start)
        source_start = start + _LAYOUT.size
        id_start = source_start + lengths[0]
        metadata_start = id_start + lengths[1]
        body_start = metadata_start + lengths[2]
        start = body_start + lengths[3]
        yield Record(
            key,
            bytes(block[source_start:id_start]),
            position,
            kind,
            bytes(block[id_start:metadata_start]),
            bytes(block[metadata_start:body_start]),
            block[body_start:start],
            line,
        )


def _pack(outcome: PlacedDocument | DeadLetter | TakenId) -> tuple[bytes, tuple[bytes, ...]]:
    source = outcome.source.encode()
    if isinstance(outcome, PlacedDocument):
        kind, name, body = _DOCUMENT, outcome.document_id, outcome.text
        metadata = encode_values(outcome.metadata)
        key, line = bytes.fromhex(document_key(name)), outcome.line
    elif isinstance(outcome, TakenId):
        kind, name, metadata, body = _TAKEN_ID, outcome.document_id, b"", b""
        key, line = bytes.fromhex(document_key(name)), None
    else:
        kind, name, metadata = _DEAD_LETTER, outcome.document_id or "", b""
        body = json.dumps([outcome.reason, outcome.detail]).encode()
        key = bytes.fromhex(document_key(f"{outcome.source}#{outcome.position}"))
        line = outcome.line
    encoded = name.encode()
    lengths = len(source), len(encoded), len(metadata), len(body)
    header = _LAYOUT.pack(key, outcome.position, line or 0, kind, *lengths)
    return key, (header, source, encoded, metadata, body)


def _drain(parts: dict[int, list[bytes]]) -> Iterator[tuple[int, bytes]]:
    while parts:
        bucket, pieces = parts.popitem()
        yield bucket, b"".join(pieces)


def _map_ranges(path: str, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
    """Yield ranges of a local file; it costs no copy, and the pages are not this process's."""
    with storage.open_to_read(path) as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    yield from (data[offset : offset + num_bytes] for offset, num_bytes in ranges)


def _read_ranges(path: str, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
    # What a larger buffer would read beyond a range belongs to other buckets.
    with storage.open_to_read(path, buffer_bytes=_SMALL_BUFFER_BYTES) as file:
        for offset, num_bytes in ranges:
            file.seek(offset)
            yield memoryview(file.read(num_bytes))
