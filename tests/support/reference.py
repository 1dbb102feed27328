"""Slow, obvious oracles: each says what is right in the plainest way there is."""

import json
from collections.abc import Sequence
from functools import cache

from tests.support.tokenizer_zoo import Definition

Range = tuple[int, int]
UNMAPPED = None


def reference_spans(student: Sequence[Range], teacher: Sequence[Range]) -> list[Range | None]:
    """Return the teacher tokens that share a byte with each student token, over sets of bytes.

    The paper's Algorithm 1 finds the same by two binary searches.
    """
    spans: list[Range | None] = []
    others = [set(range(*token)) for token in teacher]
    for start, end in student:
        covered = set(range(start, end))
        touching = [j for j, other in enumerate(others) if covered & other]
        spans.append((touching[0], touching[-1] + 1) if touching else UNMAPPED)
    return spans


def is_cut(student: Sequence[Range], teacher: Sequence[Range], i: int, j: int) -> bool:
    """Return whether all tokens before (i, j) end by some byte from which all others start."""
    if not (0 < i < len(student) and 0 < j < len(teacher)):
        return False
    left = [end for _, end in (*student[:i], *teacher[:j])]
    right = [start for start, _ in (*student[i:], *teacher[j:])]
    return max(left) <= min(right)


def reference_cuts(
    student: Sequence[Range], teacher: Sequence[Range], stride: int
) -> list[tuple[int, int]]:
    """Return the last cut of every `stride` student tokens, by trying every pair."""
    cuts = []
    for block in range(0, len(student), stride):
        found = [
            (i, j)
            for i in range(block, min(block + stride, len(student)))
            for j in range(len(teacher))
            if is_cut(student, teacher, i, j)
        ]
        cuts += found[-1:]
    return cuts


def reference_ratios(student: Range, teacher: Sequence[Range]) -> tuple[float, float]:
    """Return IoU and IoS of a student token and its teacher tokens, over sets of bytes."""
    own = set(range(*student))
    mapped = set(range(teacher[0][0], teacher[-1][1]))
    return len(own & mapped) / len(own | mapped), len(own & mapped) / len(own)


def spelled_offsets(pieces: Sequence[bytes], text: bytes) -> list[Range] | None:
    """Return ranges of tokens that spell the text, or None where they don't.

    One space too many in front covers no byte.
    """
    joined = b"".join(pieces)
    prefix = int(joined == b" " + text)
    if joined[prefix:] != text:
        return None
    ends = [sum(map(len, pieces[: i + 1])) - prefix for i in range(len(pieces))]
    starts = [end - len(piece) for end, piece in zip(ends, pieces, strict=True)]
    return [(max(start, 0), max(end, 0)) for start, end in zip(starts, ends, strict=True)]


def piece_bytes(definition: Definition, token_id: int) -> bytes:
    """Return what a token of a byte-level or SentencePiece-like BPE stands for."""
    return vocabulary_bytes(definition)[token_id]


def vocabulary_bytes(definition: Definition) -> dict[int, bytes]:
    """Return what each token stands for, by id, in a text that is normalised already."""
    model = definition["model"]
    pieces = model["vocab"]
    if not isinstance(pieces, dict):
        pieces = {piece: i for i, (piece, _) in enumerate(pieces)}
    steps = json.dumps([definition.get(n) for n in ("normalizer", "pre_tokenizer", "decoder")])
    read = _read_byte_level if '"ByteLevel"' in steps else _read_spaced
    read = str.encode if model.get("type") == "WordPiece" else read
    prefix = model.get("continuing_subword_prefix") or ""
    suffix = model.get("end_of_word_suffix") or ""
    fallback = bool(model.get("byte_fallback"))
    table = {
        i: bytes.fromhex(piece[3:5])
        if fallback and len(piece) == 6 and piece.startswith("<0x")
        else read(piece.removeprefix(prefix).removesuffix(suffix))
        for piece, i in pieces.items()
    }
    return table | {t["id"]: t["content"].encode() for t in definition["added_tokens"]}


def _read_byte_level(piece: str) -> bytes:
    table = _gpt2_bytes()
    return bytes(table[character] for character in piece if character in table)


def _read_spaced(piece: str) -> bytes:
    return piece.replace("▁", " ").encode()


@cache
def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's `bytes_to_unicode`, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    table = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            table[chr(256 + len(table) - len(printable))] = byte
    return table
