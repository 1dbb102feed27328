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
        ids = input_ids[cu_tokens[d] : cu_tokens[d + 1]]
        own = byte_offsets[cu_tokens[d] : cu_tokens[d + 1]]
        own_text = text[cu_text[d] : cu_text[d + 1]]
        total = np.int64(0)
        known = True
        for i in range(len(ids)):
            length = token_lengths[ids[i]] if ids[i] < len(token_lengths) else 0
            known &= length > 0
            total += length
        prefix = total - len(own_text)
        proven[d] = known and (prefix == 0 or prefix == 1)
        if proven[d] and prefix == 1:
            proven[d] = len(ids) > 0 and token_bytes[cu_token_bytes[ids[0]]] == SPACE
        if not proven[d]:
            own[:] = 0
            continue
        position = -prefix
        for i in range(len(ids)):
            own[i, 0] = position
            position += token_lengths[ids[i]]
            own[i, 1] = position
        if prefix == 1:
            own[0, 0] = 0
        if compare[d]:
            proven[d] = _spells(ids, own_text, token_bytes, cu_token_bytes, prefix)


@njit(cache=True, nogil=True)
def _spells(
    input_ids: NDArray[np.uint32],
    text: NDArray[np.uint8],
    token_bytes: NDArray[np.uint8],
    cu_token_bytes: NDArray[np.int64],
    prefix: np.int64,
) -> bool:
    """Return whether the tokens' bytes, less `prefix` leading ones, are exactly the text.

    The caller has shown that they are as many. Bytes are compared without a branch for each:
    texts that differ are rare.
    """
    position = np.uintp(0)
    for i in range(len(input_ids)):
        first = cu_token_bytes[input_ids[i]] + (prefix if i == 0 else 0)
        piece = token_bytes[first : cu_token_bytes[input_ids[i] + 1]]
        own = text[position : position + np.uintp(len(piece))]
        difference = np.uint8(0)
        for b in range(len(own)):
            difference |= piece[b] ^ own[b]
        if difference != 0:
            return False
        position += np.uintp(len(piece))
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
    one = np.uintp(1)  # unsigned indices spare numba the check for negative ones
    for d in range(len(student_cu) - 1):
        student = student_offsets[student_cu[d] : student_cu[d + 1]]
        teacher = teacher_offsets[teacher_cu[d] : teacher_cu[d + 1]]
        spans = teacher_spans[student_cu[d] : student_cu[d + 1]]
        stop = np.uintp(len(teacher))
        first = last_start = np.uintp(0)
        for i in range(len(student)):
            start, end = student[i, 0], student[i, 1]
            while first < stop and teacher[first, 1] <= start:
                first += one
            a = b = first
            while b < stop and teacher[b, 0] < end:
                b += one
            while b > a and teacher[b - one, 0] == teacher[b - one, 1]:
                b -= one
            while a < b and teacher[a, 0] == teacher[a, 1]:
                a += one
            if start == end or a == b:
                a = b = last_start
            last_start = a
            spans[i, 0] = a
            spans[i, 1] = b


@njit(cache=True, nogil=True)
def first_non_monotone(byte_offsets: NDArray[np.int64], cu_tokens: NDArray[np.int64]) -> int:
    """Return the first document whose starts or ends decrease, or -1."""
    for d in range(len(cu_tokens) - 1):
        own = byte_offsets[cu_tokens[d] : cu_tokens[d + 1]]
        start = end = np.int64(0)
        for i in range(len(own)):
            a, b = own[i, 0], own[i, 1]
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
    teacher_spans: NDArray[np.int64],
    stride: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find where both tokenizations share a byte boundary, the last one of every `stride` tokens.

    A cut (i, j) splits a document so that student tokens before i and teacher tokens before j
    cover bytes before some byte, and all others bytes from it on. Both parts hold tokens of both.
    Blocks are searched from their ends: most boundaries are shared, so few tokens are looked at.

    Args:
        student_offsets: int64 [N, 2], monotone within each document.
        student_cu: int64 [D + 1].
        teacher_offsets: int64 [M, 2], monotone within each document.
        teacher_cu: int64 [D + 1].
        teacher_spans: int64 [N, 2], from `merge_spans`.
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
        base, teacher_base = student_cu[d], teacher_cu[d]
        num_tokens = student_cu[d + 1] - base
        num_teacher_tokens = teacher_cu[d + 1] - teacher_base
        for block in range(0, num_tokens, stride):
            for i in range(min(block + stride, num_tokens) - 1, max(block, 1) - 1, -1):
                j = teacher_spans[base + i - 1, 1]
                if teacher_spans[base + i - 1, 0] == j or j == num_teacher_tokens:
                    continue
                student_end = student_offsets[base + i - 1, 1]
                teacher_end = teacher_offsets[teacher_base + j - 1, 1]
                student_start = student_offsets[base + i, 0]
                teacher_start = teacher_offsets[teacher_base + j, 0]
                if max(student_end, teacher_end) <= min(student_start, teacher_start):
                    cut_student[count] = i
                    cut_teacher[count] = j
                    count += 1
                    break
        cut_starts[d + 1] = count
    return cut_starts, cut_student[:count].copy(), cut_teacher[:count].copy()
