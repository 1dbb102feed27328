"""Documents with both tokenizations laid out side by side, ready to be drawn.

A *block* is the smallest run of student and teacher tokens that belong together: where both
tokenizations share a byte boundary, a block ends. "Probability" as two student tokens under one
teacher token is one block.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizers
from pipeline.drawing.blocks import PreviewDocument, ShownTokens, make_blocks
from pipeline.drawing.page_blocks import render_preview
from pipeline.drawing.web_page import tag
from pipeline.tokenization import Tokenizer
from schemas.document import AlignedDocument, decode_document, document_key
from schemas.errors import DatasetError


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
        >>> next(load_previews(dataset, num_documents=1, document_id=None, max_tokens=100)).title
        'docs/0017'
    """
    num_left = num_documents if document_id is None else 1
    for shard in range(len(dataset.manifest.shards)):
        index = dataset.read_index(shard, with_names=True)
        rows = np.delete(np.arange(len(index)), dataset.removed_of(shard))
        if document_id is not None:
            rows = rows[np.array(index.key)[rows] == document_key(document_id)]
        rows = rows[:num_left]
        name = dataset.manifest.shards[shard].file
        # A shard without any of them is not opened: a remote one would be asked for in vain.
        for _, sample in dataset.samples(shard, index, documents=rows) if len(rows) else ():
            yield lay_out(dataset, decode_document(sample), name, max_tokens=max_tokens)
        num_left -= len(rows)
        if not num_left:
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
        title=document.document_id,
        place=f"sample {document_key(document.document_id)} in {shard}",
        num_student_tokens=len(document.student),
        num_teacher_tokens=len(document.teacher),
        num_unmapped=int(unmapped.sum()),
        num_text_bytes=document.num_text_bytes,
        blocks=make_blocks(student, teacher, spans),
        has_text=document.text is not None,
    )


def render_page(dataset: Dataset, documents: Iterable[PreviewDocument]) -> str:
    """Return documents as a page for a browser.

    Example:
        >>> Path("preview.html").write_text(render_page(dataset, documents), "utf-8")
    """
    manifest = dataset.manifest
    student = tag("span", manifest.student.source, class_="student")
    teacher = tag("span", manifest.teacher.source, class_="teacher")
    head = [
        tag("h1", f"{manifest.name}, aligned"),
        tag("p", "Student ", student, " above, teacher ", teacher, " below."),
        tag("p", "Fingerprint ", tag("code", manifest.fingerprint), class_="soft small"),
    ]
    return render_preview(f"{manifest.name}: preview", head, list(documents))


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
    student, teacher = (
        ShownTokens(input_ids, byte_offsets, _vocabulary_bytes(tokenizer, input_ids, byte_offsets))
        for tokenizer, (input_ids, byte_offsets) in zip(
            (tokenizers.student, tokenizers.teacher), sides, strict=True
        )
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
