"""A shard index's columns for chats: ends of turns, and how much is learned."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import AlignedBatch, ChatParts, RenderedSide
from pipeline.chats.kernels import choose_cuts
from schemas.document import StoredChat, StoredSide
from schemas.index import CUT_STRIDE

Cuts = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""As `pipeline.alignment.kernels.find_cut_points` returns them."""


def index_chats(batch: AlignedBatch, cuts: Cuts) -> tuple[Cuts, dict[str, NDArray[Any]]]:
    """Return the cut points of chats, and the additional columns of their index.

    A text may be cut between two of its tokens, but not between it and the end of its turn, so only
    cuts inside a text remain. The end of an assistant's turn replaces the cut within its 16 tokens.
    """
    turns = np.concatenate([np.empty((0, 2), np.int64), *(chat.turns for chat in batch.chats)])
    cu_turns = np.cumsum([0, *(len(chat.turns) for chat in batch.chats)], dtype=np.int64)
    own = batch.student.byte_offsets, batch.student.cu_tokens
    table, starts = choose_cuts(cuts, turns, cu_turns, *own, CUT_STRIDE)
    columns: dict[str, NDArray[Any]] = {"cut_at_turn": table[:, 2].astype(np.uint32)}
    counts = np.array([_counts(chat) for chat in batch.chats], np.int64).reshape(-1, len(COUNTS))
    columns |= dict(zip(COUNTS, counts.T, strict=True))
    return (starts, table[:, 0], table[:, 1]), columns


COUNTS = (
    "num_learned_bytes",
    "num_learned_student_tokens",
    "num_learned_teacher_tokens",
    "num_control_strings",
    "num_seams",
    "num_lone_seams",
)


def count_learned(chat: ChatParts | StoredChat) -> tuple[int, int, int]:
    """Count learned bytes, student tokens and teacher tokens of a chat."""
    sides: tuple[RenderedSide | StoredSide, ...] = (chat.student, chat.teacher)
    learned = (chat.learned, *(side.learned for side in sides))
    num_bytes, student, teacher = (int((each[:, 1] - each[:, 0]).sum()) for each in learned)
    return num_bytes, student, teacher


def _counts(chat: ChatParts) -> tuple[int, ...]:
    return (*count_learned(chat), chat.num_control_strings, chat.num_seams, chat.num_lone_seams)
