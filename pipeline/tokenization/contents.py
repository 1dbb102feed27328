"""The bytes of a normalised text that a `tokenizer.json`'s ids stand for."""

import re
from collections.abc import Callable, Mapping

from pipeline.tokenization.definition import (
    SPACE_PIECE,
    Definition,
    added_tokens,
    is_byte_level,
    model_pieces,
    puts_space_first,
    spells_spaces,
)
from pipeline.tokenization.normalization import Normalize, framed

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def spells_text(definition: Definition) -> bool:
    """Whether tokens spell their text; WordPiece's, for one, drop white space."""
    return _speller(definition) is not None


def contents_of(
    definition: Definition, control: Mapping[str, int], *, vocab_size: int, normalize: Normalize
) -> list[bytes]:
    """Return each id's bytes in the normalised text, without white space if it is lost.

    b"" marks control tokens, the unknown token, added tokens that swallow white space or look like
    a dummy prefix, and ids of an added token and a different piece.
    """
    spell = _speller(definition) or _reader(definition)
    table = [b""] * vocab_size
    model, pieces = definition["model"], model_pieces(definition)
    for piece, token_id in pieces.items():
        table[token_id] = spell(piece)
    for token in added_tokens(definition):
        content, of_piece = _added_content(token, definition, normalize), table[token["id"]]
        table[token["id"]] = content if of_piece in (b"", content) else b""
    unknown = [pieces.get(model.get("unk_token")), model.get("unk_id")]
    for token_id in (*control.values(), *unknown):
        if token_id is not None:
            table[token_id] = b""
    return table


def _added_content(token: Definition, definition: Definition, normalize: Normalize) -> bytes:
    """Return an added token's bytes in a normalised text, b"" if unknown.

    One marked "normalized" is found as its normal form: Llama 2's `hello` as `▁hello`.
    """
    rewrite = normalize if token["normalized"] else framed(normalize)
    if rewrite is None or token.get("lstrip") or token.get("rstrip"):
        return b""
    try:
        content = rewrite(token["content"]).encode()
    except ValueError:  # merged with its neighbour
        return b""
    # Normal forms are looked for when the normaliser has put its space.
    later = definition | {"normalizer": None} if token["normalized"] else definition
    doubtful = content.startswith(b" ") and puts_space_first(later)
    return b"" if doubtful else content


def byte_names(definition: Definition) -> dict[int, bytes]:
    """Return byte ids' names, such as `<0x0A>`, which a Unigram model reads as the bytes."""
    if not definition["model"].get("byte_fallback"):
        return {}
    pieces = model_pieces(definition).items()
    return {token_id: piece.encode() for piece, token_id in pieces if _BYTE_PIECE.fullmatch(piece)}


def lost_bytes(definition: Definition) -> bytes:
    """Return bytes that a byte-level BPE without an unknown token lacks and drops."""
    model = definition["model"]
    if _speller(definition) is not _spell_byte_level or model.get("unk_token") is not None:
        return b""
    pieces = model_pieces(definition)
    return bytes(byte for piece, byte in BYTE_LEVEL_ALPHABET.items() if piece not in pieces)


def loses_characters(definition: Definition) -> bool:
    """Whether a BPE of characters drops those that it lacks."""
    model = definition["model"]
    if model["type"] != "BPE" or _speller(definition) is _spell_byte_level:
        return False
    fallback = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else {""}
    return model.get("unk_token") is None and not fallback <= set(model_pieces(definition))


def _speller(definition: Definition) -> Callable[[str], bytes] | None:
    """Return how pieces spell bytes, None if they don't spell the text."""
    model = definition["model"]
    kind = model["type"]
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if kind not in ("BPE", "Unigram") or affixes:
        return None
    if is_byte_level(definition):
        return _spell_byte_level
    if spells_spaces(definition):
        fallback = bool(model.get("byte_fallback"))
        return lambda piece: _spell_sentencepiece(piece, byte_fallback=fallback)
    return None


def _reader(definition: Definition) -> Callable[[str], bytes]:
    model = definition["model"]
    before = model.get("continuing_subword_prefix") or ""
    after = model.get("end_of_word_suffix") or ""
    if is_byte_level(definition):
        return lambda piece: _spell_byte_level(piece.removeprefix(before).removesuffix(after))
    if spells_spaces(definition):
        before = before or SPACE_PIECE
    return lambda piece: piece.removeprefix(before).removesuffix(after).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Map GPT-2's printable characters to their bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
_FROM_LATIN_1 = {byte: character for character, byte in BYTE_LEVEL_ALPHABET.items()}
_NO_BYTE = dict.fromkeys(map(chr, range(256)), "\uffff")
_TO_LATIN_1 = str.maketrans(_NO_BYTE | {c: chr(byte) for c, byte in BYTE_LEVEL_ALPHABET.items()})


def write_byte_level(piece: bytes) -> str:
    """Write bytes in GPT-2's alphabet.

    Example:
        >>> write_byte_level(b" a")
        'Ġa'
    """
    return piece.decode("latin-1").translate(_FROM_LATIN_1)


def _spell_byte_level(piece: str) -> bytes:
    try:  # twice as fast as looking each character up, for some 100,000 pieces
        return piece.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return b""


def _spell_sentencepiece(piece: str, *, byte_fallback: bool) -> bytes:
    if byte_fallback and _BYTE_PIECE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE_PIECE, " ").encode()
