"""Documents with both tokenizations."""

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import Side, load_dataset_tokenizer, text_in
from pipeline.drawing.blocks import ChatView, PreviewDocument, lay_out, show_bytes
from pipeline.drawing.page_blocks import name_sides, render_preview
from pipeline.drawing.web_page import tag
from schemas.document import AlignedDocument, decode_document, document_key
from schemas.errors import DatasetError


def load_previews(
    dataset: Dataset, *, num_documents: int, document_id: str | None, max_tokens: int
) -> Iterator[PreviewDocument]:
    """Read the first documents, or that with an id.

    Raises:
        DatasetError: no such document, or a removed one; a damaged sample or index.
    """
    num_left = num_documents if document_id is None else 1
    for shard in range(len(dataset.manifest.shards)):
        index = dataset.read_index(shard, with_names=True)
        removed = dataset.removed_of(shard)
        rows = np.delete(np.arange(len(index)), removed)
        if document_id is not None:
            is_named = np.array(index.key) == document_key(document_id)
            if is_named[removed].any():
                raise _not_shown(f'document "{document_id}" was removed from {dataset.location}')
            rows = rows[is_named[rows]]
        rows = rows[:num_left]
        name = dataset.manifest.shards[shard].file
        # A shard without any isn't opened: it may be remote.
        for _, sample in dataset.samples(shard, index, documents=rows) if len(rows) else ():
            document = decode_document(sample)
            yield lay_out(
                document.document_id,
                text_in(dataset, document),
                document.student,
                document.teacher,
                document.teacher_spans,
                num_text_bytes=document.num_text_bytes,
                place=f"sample {document_key(document.document_id)} in {name}",
                max_tokens=max_tokens,
                chat=_view(dataset, document),
            )
        num_left -= len(rows)
        if not num_left:
            return
    if document_id is not None:
        raise _not_shown(f'no document "{document_id}" in {dataset.location}')


def _not_shown(why: str) -> DatasetError:
    return DatasetError(f"{why}: name an id as the input gave it (preview without --id shows some)")


def _view(dataset: Dataset, document: AlignedDocument) -> ChatView | None:
    if document.chat is None:
        return None
    learned = document.chat.student.is_learned(len(document.student))
    names = partial(_name, dataset, "student"), partial(_name, dataset, "teacher")
    return ChatView(names, learned)


def _name(dataset: Dataset, side: Side, token_id: int) -> str:
    tokenizer = load_dataset_tokenizer(dataset, side)
    data = tokenizer.token_bytes(token_id)
    return show_bytes(data) if data else tokenizer.token_name(token_id)


def render_page(dataset: Dataset, documents: Iterable[PreviewDocument]) -> str:
    """Return a page for a browser."""
    manifest = dataset.manifest
    student, teacher = name_sides(manifest.student.source, manifest.teacher.source)
    head = [
        tag("h1", f"{manifest.name}, aligned"),
        tag("p", "Student ", student, " above, teacher ", teacher, " below."),
        tag("p", "Fingerprint ", tag("code", manifest.fingerprint), class_="soft small"),
    ]
    return render_preview(f"{manifest.name}: preview", head, list(documents))
