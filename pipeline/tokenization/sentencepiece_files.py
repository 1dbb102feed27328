"""Write a SentencePiece model's file for a `tokenizer.json`.

Without it llama.cpp's converter gives all tokens of a Llama-2-like vocabulary one score, so
llama.cpp splits texts differently.
"""

import struct
from collections.abc import Iterable, Iterator

from sentencepiece import SentencePieceProcessor

from pipeline.tokenization.conversion import ModelKind, PieceKind
from pipeline.tokenization.definition import (
    Definition,
    added_tokens,
    puts_space_first,
    token_names,
)


def sentencepiece_file(definition: Definition) -> bytes | None:
    """Return a model file with the same pieces and the merges' order as scores.

    None unless it is a BPE with byte fallback and ids without gaps. The caller must compare ids:
    normalisers, and merges of one piece that lie apart, have no counterpart.
    """
    model = definition["model"]
    if model.get("type", "BPE") != "BPE" or not model.get("byte_fallback"):
        return None
    names = token_names(definition)
    if sorted(names) != list(range(len(names))):
        return None
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    kinds = {f"<0x{byte:02X}>": PieceKind.BYTE for byte in range(256)}
    kinds |= {token["content"]: _added_kind(token["special"]) for token in added_tokens(definition)}
    kinds[model["unk_token"]] = PieceKind.UNKNOWN
    last = len(model["merges"])
    body = b"".join(
        _part(
            1,
            _part(1, names[token_id].encode())
            + _number(2, -float(ranks.get(names[token_id], last)))
            + _number(3, int(kinds.get(names[token_id], PieceKind.NORMAL))),
        )
        for token_id in range(len(names))
    )
    unknown = next(token_id for token_id, name in names.items() if name == model["unk_token"])
    trainer = {3: ModelKind.BPE, 4: len(names), 35: 1, 40: unknown}
    normalizer = {3: int(puts_space_first(definition)), 4: 0, 5: 1}
    return body + b"".join(
        _part(number, b"".join(_number(key, int(value)) for key, value in values.items()))
        for number, values in ((2, trainer), (3, normalizer))
    )


def gives_ids(data: bytes, texts: Iterable[tuple[str, list[int]]]) -> bool:
    """Whether SentencePiece loads a model file and reads each text as these ids."""
    try:
        processor = SentencePieceProcessor(model_proto=data)
    except RuntimeError:  # such as without pieces of all bytes
        return False
    return all(processor.encode(text) == ids for text, ids in texts)


def _added_kind(special: bool) -> PieceKind:
    return PieceKind.CONTROL if special else PieceKind.USER_DEFINED


def _part(field: int, data: bytes) -> bytes:
    return bytes(_varint(field << 3 | 2)) + bytes(_varint(len(data))) + data


def _number(field: int, value: float) -> bytes:
    if isinstance(value, float):
        return bytes(_varint(field << 3 | 5)) + struct.pack("<f", value)
    return bytes(_varint(field << 3)) + bytes(_varint(value))


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
