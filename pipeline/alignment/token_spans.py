"""From two tokenizations to teacher_spans: the teacher tokens that cover each student token.

Source: VocAgnoLM (arXiv 2503.19123), Algorithm 1 and section 2.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment.kernels import first_non_monotone, merge_spans
from pipeline.batches import AlignedBatch, SourceDocument, TokenBatch
from pipeline.tokenization import Tokenizer


class AlignmentError(ValueError):
    """Offsets break a rule that alignment needs."""


def align_tokens(student: TokenBatch, teacher: TokenBatch) -> NDArray[np.int32]:
    """Find the minimal run of teacher tokens that overlap each student token.

    Returns:
        teacher_spans, int32 [N, 2]: half-open ranges of each document's teacher tokens, start ==
        end if nothing overlaps (unmapped).

    Raises:
        AlignmentError: offsets decrease or are all (0, 0), or the batches differ in documents.
    """
    if student.num_documents != teacher.num_documents:
        raise AlignmentError(
            f"student batch has {student.num_documents} documents, teacher batch "
            f"{teacher.num_documents}: both must hold the same documents in the same order"
        )
    for side, tokens, others in (("student", student, teacher), ("teacher", teacher, student)):
        document = first_non_monotone(tokens.byte_offsets, tokens.cu_tokens, tokens.tiles)
        if document >= 0:
            raise AlignmentError(
                f"{side} offsets decrease in document {document} of the batch: special tokens, "
                "padding or several texts in one document; tokenize each text on its own, without "
                "special tokens"
            )
        for document in _without_offsets(tokens, others):
            raise AlignmentError(
                f"{side} offsets are all (0, 0) in document {document} of the batch: its tokenizer "
                "reported none (encode_batch_fast does so); use pipeline.tokenization"
            )
    teacher_spans: NDArray[np.int32] = merge_spans(
        student_offsets=student.byte_offsets,
        student_cu=student.cu_tokens,
        teacher_offsets=teacher.byte_offsets,
        teacher_cu=teacher.cu_tokens,
        tiles=student.tiles & teacher.tiles,
    )
    return teacher_spans


def align_batch(
    documents: Sequence[SourceDocument], student_tokenizer: Tokenizer, teacher_tokenizer: Tokenizer
) -> AlignedBatch:
    """Tokenize documents with both tokenizers and align them; `failures` has those that failed."""
    texts = [document.text for document in documents]
    for document in documents:
        if isinstance(document.text, str):
            raise ValueError(
                f"the text of document {document.document_id!r} is a str, and offsets are of UTF-8 "
                "bytes: give text.encode()"
            )
    with ThreadPoolExecutor(max_workers=1) as beside:  # the libraries let other threads run
        pending = beside.submit(teacher_tokenizer.tokenize_batch, texts)
        student = student_tokenizer.tokenize_batch(texts)
        teacher = pending.result()
    failures = find_failures(student, teacher)
    if failures:
        kept = [document for place, document in enumerate(documents) if place not in failures]
        aligned = align_batch(kept, student_tokenizer, teacher_tokenizer)
        failed = [(documents[place], failures[place]) for place in sorted(failures)]
        return replace(aligned, failures=failed)
    return AlignedBatch(documents, student, teacher, align_tokens(student, teacher))


def find_failures(student: TokenBatch, teacher: TokenBatch) -> dict[int, str]:
    """Return why documents can't be aligned, by their place in the batch."""
    failures: dict[int, str] = {}
    for side, tokens, others in (("student", student, teacher), ("teacher", teacher, student)):
        bare = dict.fromkeys(_without_offsets(tokens, others), "its tokens cover no byte")
        for place, reason in {**bare, **tokens.failures}.items():
            failures.setdefault(place, f"{side}: {reason}")
    return failures


def _without_offsets(tokens: TokenBatch, others: TokenBatch) -> list[int]:
    """Return documents in which only the other side's tokens cover bytes."""
    bare = (_last_ends(tokens) == 0) & (_last_ends(others) > 0)
    documents: list[int] = np.flatnonzero(bare).tolist()
    return documents


def _last_ends(tokens: TokenBatch) -> NDArray[np.int64]:
    """Return the end of each document's last token; -1 without tokens."""
    ends = np.full(tokens.num_documents, -1, np.int64)
    filled = np.diff(tokens.cu_tokens) > 0
    ends[filled] = tokens.byte_offsets[tokens.cu_tokens[1:][filled] - 1, 1]
    return ends
