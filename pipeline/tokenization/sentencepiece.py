"""What a SentencePiece model file says of itself.

`sentencepiece` ships a reader of its own, but that needs the newest protobuf, which other packages
(Beam, for one) don't allow. The file is a protobuf message of few fields, so they are read here.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class PieceKind(IntEnum):
    """`ModelProto.SentencePiece.Type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelKind(IntEnum):
    """`TrainerSpec.ModelType`."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    """One token: its string, its score (higher is merged earlier) and its kind."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True)
class SentencePieceModel:
    """A model file.

    Attributes:
        pieces: by id.
        kind: BPE or another.
        unk_id: of the unknown token.
        byte_fallback: whether unknown characters become their bytes.
        space_follows: whether a space belongs to the word before it.
        charsmap: compiled character rules of the normaliser, b"" for none.
        adds_dummy_prefix: whether a text is read as if a space came first.
        removes_extra_spaces: at the text's ends, and all but one within it.
    """

    pieces: tuple[Piece, ...]
    kind: ModelKind
    unk_id: int
    byte_fallback: bool
    space_follows: bool
    charsmap: bytes
    adds_dummy_prefix: bool
    removes_extra_spaces: bool


def read_sentencepiece_model(data: bytes) -> SentencePieceModel:
    """Read a model file that `sentencepiece` accepts.

    Example:
        >>> read_sentencepiece_model(Path("tokenizer.model").read_bytes()).kind
        <ModelKind.BPE: 2>
    """
    # Field numbers and defaults of sentencepiece_model.proto.
    fields = list(_fields(data))
    trainer, normalizer = dict[int, Any](), dict[int, Any]()
    for number, value in fields:
        if number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return SentencePieceModel(
        pieces=tuple(_piece(dict(_fields(value))) for number, value in fields if number == 1),
        kind=ModelKind(trainer.get(3, 1)),
        unk_id=trainer.get(40, 0),
        byte_fallback=bool(trainer.get(35, 0)),
        space_follows=bool(trainer.get(24, 0)),
        charsmap=normalizer.get(2, b""),
        adds_dummy_prefix=bool(normalizer.get(3, 1)),
        removes_extra_spaces=bool(normalizer.get(4, 1)),
    )


def _piece(message: Mapping[int, Any]) -> Piece:
    (score,) = struct.unpack("<f", message.get(2, bytes(4)))
    return Piece(message.get(1, b"").decode(), score, PieceKind(message.get(3, PieceKind.NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield each field's number and value: a varint as int, everything else as its bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}[kind]
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a variable-length integer and where it ends."""
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
