"""Documents with both tokenizations laid out side by side, ready to be drawn.

A *block* is the smallest run of student and teacher tokens that belong together: where both
tokenizations share a byte boundary, a block ends. "Probability" as two student tokens under one
teacher token is one block.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import fsspec
import numpy as np
from numpy.typing import NDArray

from pipeline.dataset_files import DatasetFiles
from pipeline.dataset_tokenizers import load_dataset_tokenizers
from pipeline.shards import check_crc32
from pipeline.tokenization import Tokenizer
from schemas.document import AlignedDocument, Tokens, decode_document, document_key
from schemas.errors import DatasetError
from schemas.index import ShardIndex


@dataclass(frozen=True)
class PreviewToken:
    """One token as people read it.

    Attributes:
        index: its place in the document.
        token_id: its vocabulary id.
        text: its bytes made visible, see `show_bytes`.
        byte_range: the bytes of the text that it covers, half-open.
        mapped: the half-open range of tokens of the other side; empty for an unmapped student
            token and for a teacher token that no student token is mapped to.
        is_bytes: whether its bytes are no whole characters.
    """

    index: int
    token_id: int
    text: str
    byte_range: tuple[int, int]
    mapped: tuple[int, int]
    is_bytes: bool


@dataclass(frozen=True)
class Block:
    """Student and teacher tokens that belong together; one side may be empty."""

    student: tuple[PreviewToken, ...]
    teacher: tuple[PreviewToken, ...]


@dataclass(frozen=True)
class PreviewDocument:
    """One document, or its beginning.

    Attributes:
        document_id: its id.
        key: its sample's key.
        shard: its shard's name.
        num_student_tokens: in the whole document.
        num_teacher_tokens: in the whole document.
        num_unmapped: student tokens of the whole document without a teacher token.
        num_text_bytes: of the whole document.
        has_text: whether token texts are the document's own bytes, not the vocabulary's.
        blocks: what is shown, in order.
    """

    document_id: str
    key: str
    shard: str
    num_student_tokens: int
    num_teacher_tokens: int
    num_unmapped: int
    num_text_bytes: int
    has_text: bool
    blocks: tuple[Block, ...]

    @property
    def num_shown(self) -> int:
        """Student tokens that are shown."""
        return sum(len(block.student) for block in self.blocks)


def load_previews(
    files: DatasetFiles, *, num_documents: int, document_id: str | None, max_tokens: int
) -> Iterator[PreviewDocument]:
    """Read documents to look at: one by its id, or the first of the dataset.

    Args:
        files: the dataset.
        num_documents: how many, where no id is given.
        document_id: the one to show.
        max_tokens: student tokens shown of each.

    Raises:
        DatasetError: no such document; a sample or index is damaged.

    Example:
        >>> next(load_previews(files, num_documents=1, document_id=None, max_tokens=100)).key
        '000d5b0c3f2e4a8d9c1b7e6f5a4d3c2b'
    """
    num_left = num_documents
    key = None if document_id is None else document_key(document_id)
    for shard in range(len(files.manifest.shards)):
        index = files.read_index(shard, with_names=True)
        first, last = (0, num_left) if key is None else _find_row(index, key)
        rows = range(first, min(last, len(index)))
        for row in rows:
            document = _read_document(files, shard, index, row)
            yield lay_out(files, document, files.manifest.shards[shard].file, max_tokens=max_tokens)
        num_left -= len(rows)
        if num_left <= 0 or (key is not None and rows):
            return
    if document_id is not None:
        raise DatasetError(
            f'no document "{document_id}" in {files.root}: name an id as the input gave it '
            "(preview without --id shows some)"
        )


def lay_out(
    files: DatasetFiles, document: AlignedDocument, shard: str, *, max_tokens: int
) -> PreviewDocument:
    """Return a document's tokens in blocks, the first `max_tokens` student tokens of it."""
    spans = document.teacher_spans[:max_tokens]
    whole = len(spans) == len(document.student)
    num_teacher = len(document.teacher) if whole else int(spans[:, 1].max(initial=0))
    student, teacher = _texts(files, document, len(spans), num_teacher)
    student_tokens = _tokens(document.student, student, spans)
    teacher_tokens = _tokens(document.teacher, teacher, _invert(spans, num_teacher))
    blocks = [
        Block(tuple(student_tokens[slice(*s)]), tuple(teacher_tokens[slice(*t)]))
        for s, t in find_blocks(spans, num_teacher)
    ]
    unmapped = document.teacher_spans[:, 0] == document.teacher_spans[:, 1]
    return PreviewDocument(
        document_id=document.document_id,
        key=document_key(document.document_id),
        shard=shard,
        num_student_tokens=len(document.student),
        num_teacher_tokens=len(document.teacher),
        num_unmapped=int(unmapped.sum()),
        num_text_bytes=document.num_text_bytes,
        has_text=document.text is not None,
        blocks=tuple(blocks),
    )


def find_blocks(
    teacher_spans: NDArray[np.int64], num_teacher_tokens: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Divide two aligned token sequences into the smallest runs that belong together.

    Args:
        teacher_spans: int64 [T_student, 2].
        num_teacher_tokens: T_teacher.

    Returns:
        Half-open ranges of student and teacher tokens, in order; together they hold every token
        once. An unmapped student token, or a teacher token that nothing maps to, is a block of
        its own unless it lies inside another.

    Example:
        >>> find_blocks(np.array([[0, 1], [0, 1], [1, 3]]), 3)
        [((0, 2), (0, 1)), ((2, 3), (1, 3))]
    """
    blocks: list[tuple[tuple[int, int], tuple[int, int]]] = []
    reach = 0
    for i, (start, end) in enumerate(teacher_spans.tolist()):
        if start == end:
            blocks.append(((i, i + 1), (reach, reach)))
            continue
        blocks += [((i, i), (t, t + 1)) for t in range(reach, start)]
        first = i
        while blocks and start < reach:
            (first, _), (begin, _) = blocks.pop()
            if begin <= start:
                start = begin
                break
        blocks.append(((first, i + 1), (start, max(reach, end))))
        reach = max(reach, end)
    num_student = len(teacher_spans)
    return blocks + [((num_student,) * 2, (t, t + 1)) for t in range(reach, num_teacher_tokens)]


def show_bytes(data: bytes) -> str:
    r"""Return bytes as people read them: white space visible, broken characters as `<0xF0>`.

    Example:
        >>> show_bytes(b" the\n\xf0\x9f")
        '·the⏎<0xF0><0x9F>'
    """
    text = data.decode("utf-8", "surrogateescape")
    # A mark that combines with the token before it needs something to stand on.
    base = "◌" if text and unicodedata.category(text[0]).startswith("M") else ""
    return base + "".join(_show_character(character) for character in text)


def _show_character(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"<0x{code - 0xDC00:02X}>"
    if character in _VISIBLE:
        return _VISIBLE[character]
    return character if character.isprintable() else f"<U+{code:04X}>"


def _texts(
    files: DatasetFiles, document: AlignedDocument, num_student: int, num_teacher: int
) -> tuple[list[bytes | None], list[bytes | None]]:
    """Return the bytes of the shown tokens of both sides; None where nothing knows them."""
    sides = ((document.student, num_student), (document.teacher, num_teacher))
    if document.text is not None:
        text = document.text
        student, teacher = (
            [text[start:end] or None for start, end in tokens.byte_offsets[:num].tolist()]
            for tokens, num in sides
        )
        return student, teacher
    tokenizers = load_dataset_tokenizers(files.root, files.manifest)
    loaded: tuple[Tokenizer, Tokenizer] = (tokenizers.student, tokenizers.teacher)
    student, teacher = (
        [
            _vocabulary_bytes(tokenizer, token_id, end - start)
            for token_id, (start, end) in zip(
                tokens.input_ids[:num].tolist(), tokens.byte_offsets[:num].tolist(), strict=True
            )
        ]
        for tokenizer, (tokens, num) in zip(loaded, sides, strict=True)
    )
    return student, teacher


def _vocabulary_bytes(tokenizer: Tokenizer, token_id: int, num_bytes: int) -> bytes | None:
    """Return the bytes that a token covers, as its tokenizer spells them.

    A dummy prefix covers fewer bytes than the vocabulary gives it, a character that a normaliser
    composed covers more.
    """
    data = tokenizer.token_bytes(token_id)
    if not data or not num_bytes:
        return None
    return data[max(len(data) - num_bytes, 0) :]


def _tokens(
    tokens: Tokens, texts: list[bytes | None], mapped: NDArray[np.int64]
) -> list[PreviewToken]:
    rows = zip(
        texts,
        tokens.input_ids[: len(texts)].tolist(),
        tokens.byte_offsets[: len(texts)].tolist(),
        mapped.tolist(),
        strict=True,
    )
    return [
        PreviewToken(
            index=index,
            token_id=token_id,
            text=_describe(data, token_id, end - start),
            byte_range=(start, end),
            mapped=(first, last),
            is_bytes=data is not None and _is_broken(data),
        )
        for index, (data, token_id, (start, end), (first, last)) in enumerate(rows)
    ]


def _describe(data: bytes | None, token_id: int, num_bytes: int) -> str:
    if data is not None:
        return show_bytes(data)
    return f"#{token_id}" if num_bytes else "∅"


def _is_broken(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def _invert(teacher_spans: NDArray[np.int64], num_teacher: int) -> NDArray[np.int64]:
    """Return the range of student tokens that each teacher token is part of a span of."""
    ranges = np.zeros((num_teacher, 2), np.int64)
    for i, (start, end) in enumerate(teacher_spans.tolist()):
        for t in range(start, end):
            ranges[t] = (ranges[t, 0] if ranges[t, 1] else i, i + 1)
    return ranges


def _find_row(index: ShardIndex, key: str) -> tuple[int, int]:
    """Return the row that holds a key, as a range that is empty where none does."""
    keys = list(index.key)
    return (keys.index(key), keys.index(key) + 1) if key in keys else (0, 0)


def _read_document(files: DatasetFiles, shard: int, index: ShardIndex, row: int) -> AlignedDocument:
    tar = files.shard(shard)
    with fsspec.open(tar.url, "rb") as file:
        file.seek(int(index.payload_offset[row]))
        payload = file.read(int(index.payload_bytes[row]))
    name = files.manifest.shards[shard].file
    check_crc32(payload, int(index.crc32[row]), shard=name, key=index.key[row])
    return decode_document(payload)


_VISIBLE = {" ": "·", "\n": "⏎", "\t": "→", "\r": "␍"}
