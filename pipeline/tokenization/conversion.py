"""A SentencePiece model as a `tokenizer.json` that gives the same ids.

`transformers` reads SentencePiece models through classes that split a text otherwise than the model
does (no dummy prefix, another normaliser). This conversion states what the model states, so that
its ids can be compared; whoever exports it compares them (`pipeline.models.exported_tokenizer`).
"""

from base64 import b64encode
from collections.abc import Sequence

from pipeline.tokenization.definition import SPACE_PIECE, Definition
from pipeline.tokenization.sentencepiece import (
    ModelKind,
    Piece,
    PieceKind,
    SentencePieceModel,
    read_sentencepiece_model,
)
from pipeline.tokenization.sources import TokenizerError


def convert_sentencepiece(data: bytes, *, source: str) -> Definition:
    """Return the `tokenizer.json` of a SentencePiece model.

    Args:
        data: the model's file.
        source: what the user named, for errors.

    Raises:
        TokenizerError: neither BPE nor Unigram, or spaces that belong to the word before them.

    Example:
        >>> convert_sentencepiece(Path("tokenizer.model").read_bytes(), source="mistral")["version"]
        '1.0'
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
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model.pieces),
        "normalizer": _normalizer(model),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(model),
        "model": _bpe(model) if model.kind is ModelKind.BPE else _unigram(model),
    }


def _added_tokens(pieces: Sequence[Piece]) -> list[Definition]:
    return [
        {
            "id": token_id,
            "content": piece.text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": piece.kind is not PieceKind.USER_DEFINED,
        }
        for token_id, piece in enumerate(pieces)
        if piece.kind in (PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.USER_DEFINED)
    ]


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
        "dropout": None,
        "unk_token": model.pieces[model.unk_id].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: token_id for token_id, piece in enumerate(model.pieces)},
        "merges": _merges(model.pieces),
    }


def _merges(pieces: Sequence[Piece]) -> list[list[str]]:
    """Return every pair that makes a piece, the best piece first, as SentencePiece merges them.

    Control, byte and user-defined pieces are made by no merge: no text spells them. Of pieces with
    equal scores (Mistral's runs of spaces) the one with the smaller id comes first.
    """
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
