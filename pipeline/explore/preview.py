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
from pipeline.drawing.blocks import PreviewDocument, ShownTokens, make_blocks
from pipeline.tokenization import Tokenizer
from schemas.document import AlignedDocument, decode_document, document_key
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
        kept = np.delete(np.arange(len(index)), dataset.removed_of(shard)).tolist()
        found = kept[:num_left] if key is None else range(*_find_row(index, key))
        rows = [row for row in found if row in kept]
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
    student, teacher = _shown_tokens(dataset, document, len(spans), num_teacher)
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
        blocks=make_blocks(student, teacher, spans),
    )


def _shown_tokens(
    dataset: Dataset, document: AlignedDocument, num_student: int, num_teacher: int
) -> tuple[ShownTokens, ShownTokens]:
    """Return the first tokens of both sides, by the kept text or else by the vocabularies."""
    sides = [
        (tokens.input_ids[:num], tokens.byte_offsets[:num])
        for tokens, num in ((document.student, num_student), (document.teacher, num_teacher))
    ]
    if document.text is not None:
        text = document.text
        student, teacher = (ShownTokens.of_text(text, *side) for side in sides)
        return student, teacher
    tokenizers = load_dataset_tokenizers(dataset)
    loaded: tuple[Tokenizer, Tokenizer] = (tokenizers.student, tokenizers.teacher)
    student, teacher = (
        ShownTokens(input_ids, byte_offsets, _vocabulary_bytes(tokenizer, input_ids, byte_offsets))
        for tokenizer, (input_ids, byte_offsets) in zip(loaded, sides, strict=True)
    )
    return student, teacher


def _vocabulary_bytes(
    tokenizer: Tokenizer, input_ids: NDArray[np.integer], byte_offsets: NDArray[np.integer]
) -> list[bytes | None]:
    """Return the bytes that each token covers, as its tokenizer spells it.

    A dummy prefix covers fewer bytes than the vocabulary gives it, a character that a normaliser
    composed covers more.
    """
    contents: list[bytes | None] = []
    for token_id, (start, end) in zip(input_ids.tolist(), byte_offsets.tolist(), strict=True):
        data = tokenizer.token_bytes(token_id)
        spelled = data[max(len(data) - (end - start), 0) :] if data and end > start else None
        contents.append(spelled)
    return contents


def _find_row(index: ShardIndex, key: str) -> tuple[int, int]:
    """Return the row that holds a key, as a range that is empty where none does."""
    keys = list(index.key)
    return (keys.index(key), keys.index(key) + 1) if key in keys else (0, 0)
