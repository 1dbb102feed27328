"""The inner loops, compiled with numba: everything that touches one token at a time.

All kernels work on whole batches (`pipeline.batches`), one document after another. numba's loops
run 10 to 30 times faster here than numpy's, which would pass over each array many times.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

SPACE = np.uint8(0x20)


@njit(cache=True, nogil=True)
def offsets_from_vocabulary(
    input_ids: NDArray[np.uint32],
    cu_tokens: NDArray[np.int64],
    text: NDArray[np.uint8],
    cu_text: NDArray[np.int64],
    compare: NDArray[np.bool_],
    token_bytes: NDArray[np.uint8],
    cu_token_bytes: NDArray[np.int64],
    token_lengths: NDArray[np.int32],
    byte_offsets: NDArray[np.int64],
    proven: NDArray[np.bool_],
) -> None:
    """Lay each document's tokens side by side over its text and prove that they fit.

    A tokenizer that puts a space before the text (SentencePiece's dummy prefix, byte-level
    `add_prefix_space`) gives one byte more than the text has: that space covers no byte.

    Args:
        input_ids: uint32 [N].
        cu_tokens: int64 [D + 1].
        text: uint8 [B], the documents' bytes.
        cu_text: int64 [D + 1].
        compare: bool [D], whether to compare every byte; else the sum of lengths must do.
        token_bytes: uint8, the bytes of each vocabulary entry, one after another.
        cu_token_bytes: int64 [V + 1]; entry v is `token_bytes[cu[v]:cu[v + 1]]`.
        token_lengths: int32 [V], bytes of each entry; 0 marks one that no text may hold.
        byte_offsets: int64 [N, 2], written here.
        proven: bool [D], written here: whether the tokens tile the text.
    """
    for d in range(len(cu_tokens) - 1):
        first, last = cu_tokens[d], cu_tokens[d + 1]
        begin, size = cu_text[d], cu_text[d + 1] - cu_text[d]
        position = np.int64(0)
        known = True
        for i in range(first, last):
            v = input_ids[i]
            length = token_lengths[v] if v < len(token_lengths) else 0
            known &= length > 0
            byte_offsets[i, 0] = position
            position += length
            byte_offsets[i, 1] = position
        prefix = position - size
        proven[d] = known and (prefix == 0 or prefix == 1)
        if proven[d] and prefix == 1:
            proven[d] = last > first and token_bytes[cu_token_bytes[input_ids[first]]] == SPACE
            for i in range(first, last):
                byte_offsets[i, 0] = max(byte_offsets[i, 0] - 1, 0)
                byte_offsets[i, 1] -= 1
        if proven[d] and compare[d]:
            proven[d] = _spells(
                input_ids[first:last], text[begin : begin + size], token_bytes, cu_token_bytes, prefix
            )


@njit(cache=True, nogil=True)
def _spells(
    input_ids: NDArray[np.uint32],
    text: NDArray[np.uint8],
    token_bytes: NDArray[np.uint8],
    cu_token_bytes: NDArray[np.int64],
    prefix: int,
) -> bool:
    """Return whether the tokens' bytes, less `prefix` leading ones, are exactly the text."""
    position = -prefix
    for v in input_ids:
        for b in range(cu_token_bytes[v], cu_token_bytes[v + 1]):
            if position >= 0 and token_bytes[b] != text[position]:
                return False
            position += 1
    return True


@njit(cache=True, nogil=True)
def merge_spans(
    student_offsets: NDArray[np.int64],
    student_cu: NDArray[np.int64],
    teacher_offsets: NDArray[np.int64],
    teacher_cu: NDArray[np.int64],
    teacher_spans: NDArray[np.int64],
) -> None:
    """Find for each student token the minimal run of teacher tokens that overlap it.

    One merge over both monotone sequences, O(N + M), with the answer of the paper's Algorithm 1
    (two binary searches per token). Teacher tokens that cover no byte are stepped over at the
    ends of a run.

    Args:
        student_offsets: int64 [N, 2], monotone within each document.
        student_cu: int64 [D + 1].
        teacher_offsets: int64 [M, 2], monotone within each document.
        teacher_cu: int64 [D + 1].
        teacher_spans: int64 [N, 2], written here; an unmapped token's empty span stands at the
            start of the last span before it.
    """
    for d in range(len(student_cu) - 1):
        base, stop = teacher_cu[d], teacher_cu[d + 1]
        j = base
        last_start = np.int64(0)
        for i in range(student_cu[d], student_cu[d + 1]):
            start, end = student_offsets[i, 0], student_offsets[i, 1]
            teacher_spans[i, 0] = last_start
            teacher_spans[i, 1] = last_start
            if start == end:
                continue
            while j < stop and teacher_offsets[j, 1] <= start:
                j += 1
            while j < stop and teacher_offsets[j, 0] == teacher_offsets[j, 1]:
                j += 1
            k = j
            run_end = j
            while k < stop and teacher_offsets[k, 0] < end:
                k += 1
                if teacher_offsets[k - 1, 0] < teacher_offsets[k - 1, 1]:
                    run_end = k
            if run_end > j:
                last_start = j - base
                teacher_spans[i, 0] = last_start
                teacher_spans[i, 1] = run_end - base


@njit(cache=True, nogil=True)
def first_non_monotone(byte_offsets: NDArray[np.int64], cu_tokens: NDArray[np.int64]) -> int:
    """Return the first document whose starts or ends decrease, or -1."""
    for d in range(len(cu_tokens) - 1):
        start = end = np.int64(0)
        for i in range(cu_tokens[d], cu_tokens[d + 1]):
            a, b = byte_offsets[i, 0], byte_offsets[i, 1]
            if a < start or b < end or b < a:
                return d
            start, end = a, b
    return -1


def flatten_bytes(texts: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return byte strings as one uint8 array and where each starts (int64 [D + 1])."""
    cu_text = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=cu_text[1:])
    return np.frombuffer(b"".join(texts), np.uint8), cu_text


@njit(cache=True, nogil=True)
def find_cut_points(
    student_offsets: NDArray[np.int64],
    student_cu: NDArray[np.int64],
    teacher_offsets: NDArray[np.int64],
    teacher_cu: NDArray[np.int64],
    stride: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find where both tokenizations share a byte boundary, the last one of every `stride` tokens.

    A cut (i, j) splits a document so that student tokens before i and teacher tokens before j
    cover bytes before some byte, and all others bytes from it on. Both parts hold tokens of both.

    Args:
        student_offsets: int64 [N, 2], monotone within each document.
        student_cu: int64 [D + 1].
        teacher_offsets: int64 [M, 2], monotone within each document.
        teacher_cu: int64 [D + 1].
        stride: student tokens per kept cut.

    Returns:
        cut_starts int64 [D + 1], cut_student int64 [C], cut_teacher int64 [C].
    """
    num_documents = len(student_cu) - 1
    cut_starts = np.zeros(num_documents + 1, np.int64)
    cut_student = np.empty(len(student_offsets) // stride + num_documents, np.int64)
    cut_teacher = np.empty(len(cut_student), np.int64)
    count = 0
    for d in range(num_documents):
        base, last = student_cu[d], student_cu[d + 1]
        teacher_base, teacher_last = teacher_cu[d], teacher_cu[d + 1]
        j = teacher_base
        block = np.int64(-1)
        for i in range(base + 1, last):
            start = student_offsets[i, 0]
            while j < teacher_last and teacher_offsets[j, 1] <= start:
                j += 1
            if j == teacher_base or j == teacher_last:
                continue
            low = max(student_offsets[i - 1, 1], teacher_offsets[j - 1, 1])
            if low > min(start, teacher_offsets[j, 0]):
                continue
            here = (i - base) // stride
            if here != block:
                block = here
                count += 1
            cut_student[count - 1] = i - base
            cut_teacher[count - 1] = j - teacher_base
        cut_starts[d + 1] = count
    return cut_starts, cut_student[:count].copy(), cut_teacher[:count].copy()
