"""Convert a SentencePiece model to a `tokenizer.json` with the same ids.

The classes of `transformers` split texts differently (no dummy prefix, a different normaliser). The
protobuf message is read here, since `sentencepiece`'s reader needs a newer protobuf than Beam
allows.
"""

import struct
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from pipeline.tokenization.definition import SPACE_PIECE, Definition, added_token
from pipeline.tokenization.sources import TokenizerError

_VARINT, _BYTES, _FIXED32 = 0, 2, 5


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


class VocabularyPiece(NamedTuple):
    """One token; a higher score is merged earlier."""

    text: str
    score: float
    kind: PieceKind


class SentencePieceModel(NamedTuple):
    """A model file, its pieces by id.

    With `space_follows`, spaces belong to the word before them. Extra spaces are those at a text's
    ends and repeated ones.
    """

    pieces: Sequence[VocabularyPiece]
    kind: ModelKind
    unk_id: int
    byte_fallback: bool
    space_follows: bool
    charsmap: bytes
    adds_dummy_prefix: bool
    removes_extra_spaces: bool


def convert_sentencepiece(data: bytes, *, source: str) -> Definition:
    """Convert a SentencePiece model's file; errors name its `source`.

    Raises:
        TokenizerError: neither BPE nor Unigram, or spaces belong to the word before them.
    """
    model = read_sentencepiece_model(data)
    if model.kind not in (ModelKind.BPE, ModelKind.UNIGRAM) or model.space_follows:
        raise TokenizerError(
            f'tokenizer "{source}" is a SentencePiece model of kind {model.kind.name} (spaces '
            f"follow words: {model.space_follows}); only BPE and UNIGRAM with spaces before words "
            "have a tokenizer.json: export the model without a tokenizer"
        )
    return {
        "version": "1.0",
        "added_tokens": [
            added_token(token_id, piece.text, special=piece.kind is not PieceKind.USER_DEFINED)
            for token_id, piece in enumerate(model.pieces)
            if piece.kind in (PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.USER_DEFINED)
        ],
        "normalizer": _normalizer(model),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(model),
        "model": _bpe(model) if model.kind is ModelKind.BPE else _unigram(model),
    }


def read_sentencepiece_model(data: bytes) -> SentencePieceModel:
    """Read a model file that `sentencepiece` accepts."""
    # Field numbers and defaults of sentencepiece_model.proto.
    fields = list(_fields(data))
    trainer, normalizer = (
        {key: value for number, part in fields if number == own for key, value in _fields(part)}
        for own in (2, 3)
    )
    return SentencePieceModel(
        pieces=[_piece(dict(_fields(value))) for number, value in fields if number == 1],
        kind=ModelKind(trainer.get(3, 1)),
        unk_id=trainer.get(40, 0),
        byte_fallback=bool(trainer.get(35, 0)),
        space_follows=bool(trainer.get(24, 0)),
        charsmap=normalizer.get(2, b""),
        adds_dummy_prefix=bool(normalizer.get(3, 1)),
        removes_extra_spaces=bool(normalizer.get(4, 1)),
    )


def _normalizer(model: SentencePieceModel) -> Definition:
    steps: list[Definition] = []
    if model.charsmap:
        charsmap = b64encode(model.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.removes_extra_spaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.adds_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE_PIECE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE_PIECE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(model: SentencePieceModel) -> Definition:
    steps: list[Definition] = [
        {"type": "Replace", "pattern": {"String": SPACE_PIECE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.adds_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _bpe(model: SentencePieceModel) -> Definition:
    return {
        "type": "BPE",
        "unk_token": model.pieces[model.unk_id].text,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "vocab": {piece.text: token_id for token_id, piece in enumerate(model.pieces)},
        "merges": _merges(model.pieces),
    }


def _merges(pieces: Sequence[VocabularyPiece]) -> list[list[str]]:
    """Return every pair that makes a piece, as SentencePiece merges: best first, then by id."""
    place = {
        piece.text: token_id
        for token_id, piece in enumerate(pieces)
        if piece.kind in (PieceKind.NORMAL, PieceKind.UNUSED)
    }
    found: list[tuple[float, int, int, int, str, str]] = []
    for merged, token_id in place.items():
        for cut in range(1, len(merged)):
            left, right = merged[:cut], merged[cut:]
            if left in place and right in place:
                score = pieces[token_id].score
                found.append((-score, token_id, place[left], place[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def _unigram(model: SentencePieceModel) -> Definition:
    return {
        "type": "Unigram",
        "unk_id": model.unk_id,
        "vocab": [[piece.text, piece.score] for piece in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _piece(message: Mapping[int, Any]) -> VocabularyPiece:
    (score,) = struct.unpack("<f", message.get(2, bytes(4)))
    return VocabularyPiece(
        message.get(1, b"").decode(), score, PieceKind(message.get(3, PieceKind.NORMAL))
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = _varint(data, at) if kind == _BYTES else ({_FIXED32: 4}[kind], at)
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
