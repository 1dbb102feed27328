"""Read samples through a view: as they would be, had its tokenizer made the dataset."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import BinaryIO

import numpy as np

from schemas.document import AlignedDocument, Tokens, decode_document, encode_document
from schemas.errors import DamagedSampleError, DamagedShardError
from schemas.view_file import VIEW_MAGIC, Side, decode_view
from schemas.view_index import ViewIndex

REMEDY = "restore it, or remove the view's files and make it again with vocag add-"
"""What to do about a damaged file of a view; the view's side follows."""


def see_samples(
    samples: Iterable[tuple[int, memoryview]],
    file: BinaryIO,
    index: ViewIndex,
    side: Side,
    *,
    name: str,
) -> Iterator[tuple[int, memoryview]]:
    """Yield samples with the tokens of one side, and the spans, that a view holds.

    Args:
        samples: each one's place in the shard's index, and its payload.
        file: the view's file of that shard, opened for binary reading and seekable.
        index: the view's index of it.
        side: which one the view replaces.
        name: of the file, for errors.

    Yields:
        the sample's place, and its bytes.

    Raises:
        DamagedShardError: it is no view's file, or is cut.
        DamagedSampleError: a payload was altered.
    """
    starts = index.starts.tolist()
    require_view_file(file.read(len(VIEW_MAGIC)), name, side)
    for place, sample in samples:
        file.seek(starts[place])
        payload = file.read(starts[place + 1] - starts[place])
        document = decode_document(sample)
        whose = partial('of document "{}"'.format, document.document_id)
        check_payload(payload, index, place, name=name, where=whose, side=side)
        seen = see_document(payload, document, side, int(index.num_tokens[place]))
        yield place, memoryview(encode_document(seen))


def see_document(
    payload: bytes, document: AlignedDocument, side: Side, num_tokens: int
) -> AlignedDocument:
    """Return a document as a view holds it; without tokens of its side where the view has none."""
    if payload:
        return decode_view(payload, document, side, num_tokens)
    nothing = Tokens(np.empty(0, np.int64), np.empty((0, 2), np.int64))
    num_student = 0 if side == "student" else len(document.student)
    spans = np.zeros((num_student, 2), np.int64)
    if side == "student":
        return replace(document, student=nothing, teacher_spans=spans)
    return replace(document, teacher=nothing, teacher_spans=spans)


def require_view_file(head: bytes, name: str, side: Side) -> None:
    """Check a view file's first bytes.

    Raises:
        DamagedShardError: they are others.
    """
    if head != VIEW_MAGIC:
        raise DamagedShardError(
            f"{name} begins with {head.hex()}, a view's file of this release with "
            f"{VIEW_MAGIC.hex()}: {REMEDY}{side}"
        )


def check_payload(
    payload: bytes | memoryview,
    index: ViewIndex,
    place: int,
    *,
    name: str,
    where: Callable[[], str],
    side: Side,
) -> None:
    """Check a payload against the view's index.

    Raises:
        DamagedSampleError: it is cut or altered; names document and file.
    """
    found, expected = zlib.crc32(payload), int(index.crc32[place])
    if len(payload) != index.payload_bytes[place] or found != expected:
        raise DamagedSampleError(
            f"the {index.payload_bytes[place]} bytes {where()} at {index.starts[place]} of {name} "
            f"have CRC-32 {found:08x}, the view's index says {expected:08x}: they were altered or "
            f"cut; {REMEDY}{side}"
        )
