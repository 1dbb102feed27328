"""A shard index's columns for chats."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import ChatParts, PerDocument, TokenBatch
from pipeline.chats.kernels import choose_cuts
from schemas.document import StoredChat
from schemas.index import CUT_STRIDE

Cuts = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""As `pipeline.alignment.kernels.find_cut_points` returns them."""


def index_chats(
    chats: ChatParts, student: TokenBatch, cuts: Cuts
) -> tuple[Cuts, dict[str, NDArray[Any]]]:
    """Return the cut points of chats, and the additional columns of their index.

    Only cuts inside a text remain. The end of an assistant's turn replaces the cut within its 16
    tokens.
    """
    own = student.byte_offsets, student.cu_tokens
    table, starts = choose_cuts(cuts, *chats.turns, *own, CUT_STRIDE)
    learned = map(_totals, (chats.learned, chats.student.learned, chats.teacher.learned))
    counts = *learned, chats.num_control_strings, chats.num_seams, chats.num_lone_seams
    columns: dict[str, NDArray[Any]] = {"cut_at_turn": table[:, 2].astype(np.uint32)}
    columns |= dict(zip(COUNTS, counts, strict=True))
    return (starts, table[:, 0], table[:, 1]), columns


COUNTS = (
    "num_learned_bytes",
    "num_learned_student_tokens",
    "num_learned_teacher_tokens",
    "num_control_strings",
    "num_seams",
    "num_lone_seams",
)


def count_learned(chat: StoredChat) -> tuple[int, int, int]:
    """Count a chat's learned bytes, student tokens and teacher tokens."""
    learned = (chat.learned, chat.student.learned, chat.teacher.learned)
    num_bytes, student, teacher = (int((each[:, 1] - each[:, 0]).sum()) for each in learned)
    return num_bytes, student, teacher


def _totals(ranges: PerDocument) -> NDArray[np.int64]:
    values, cu = ranges
    before = np.cumsum(np.append(0, values[:, 1] - values[:, 0]), dtype=np.int64)
    return np.diff(before[cu])
