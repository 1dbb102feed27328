"""Documents with both tokenizations laid out side by side, ready to be drawn.

A *block* is the smallest run of student and teacher tokens that belong together: where both
tokenizations share a byte boundary, a block ends. "Probability" as two student tokens under one
teacher token is one block.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizers
from pipeline.drawing.blocks import (
    Block,
    PreviewDocument,
    PreviewToken,
    _invert,
    _is_broken,
    find_blocks,
    show_bytes,
)
from pipeline.tokenization import Tokenizer
from schemas.document import AlignedDocument, Tokens, decode_document, document_key
from schemas.errors import DatasetError
from schemas.index import ShardIndex


def load_previews(
    dataset: Dataset, *, num_documents: int, document_id: str | None, max_tokens: int
) -> Iterator[PreviewDocument]:
    """Read documents to look at: one by its id, or the first of the dataset.

    Args:
        dataset: the dataset.
        num_documents: how many, where no id is given.
        document_id: the one to show.
        max_tokens: student tokens shown of each.

    Raises:
        DatasetError: no such document; a sample or index is damaged.

    Example:
        >>> next(load_previews(dataset, num_documents=1, document_id=None, max_tokens=100)).key
        '000d5b0c3f2e4a8d9c1b7e6f5a4d3c2b'
    """
    num_left = num_documents
    key = None if document_id is None else document_key(document_id)
    for shard in range(len(dataset.manifest.shards)):
        index = dataset.read_index(shard, with_names=True)
        first, last = (0, num_left) if key is None else _find_row(index, key)
        rows = range(first, min(last, len(index)))
        name = dataset.manifest.shards[shard].file
        # A shard without any of them is not opened: a remote one would be asked for in vain.
        for _, sample in dataset.samples(shard, index, documents=rows) if rows else ():
            yield lay_out(dataset, decode_document(sample), name, max_tokens=max_tokens)
        num_left -= len(rows)
        if num_left <= 0 or (key is not None and rows):
            return
    if document_id is not None:
        raise DatasetError(
            f'no document "{document_id}" in {dataset.location}: name an id as the input gave it '
            "(preview without --id shows some)"
        )


def lay_out(
    dataset: Dataset, document: AlignedDocument, shard: str, *, max_tokens: int
) -> PreviewDocument:
    """Return a document's tokens in blocks, the first `max_tokens` student tokens of it."""
    spans = document.teacher_spans[:max_tokens]
    whole = len(spans) == len(document.student)
    num_teacher = len(document.teacher) if whole else int(spans[:, 1].max(initial=0))
    student, teacher = _texts(dataset, document, len(spans), num_teacher)
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


def _texts(
    dataset: Dataset, document: AlignedDocument, num_student: int, num_teacher: int
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
    tokenizers = load_dataset_tokenizers(dataset.location, dataset.manifest)
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


def _find_row(index: ShardIndex, key: str) -> tuple[int, int]:
    """Return the row that holds a key, as a range that is empty where none does."""
    keys = list(index.key)
    return (keys.index(key), keys.index(key) + 1) if key in keys else (0, 0)
