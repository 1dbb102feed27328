"""A shard index's columns for chats: ends of turns, and how much is learned."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import AlignedBatch, ChatParts, RenderedSide
from schemas.document import StoredChat, StoredSide
from schemas.index import CUT_STRIDE

Cuts = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""As `pipeline.alignment.kernels.find_cut_points` returns them."""


def index_chats(batch: AlignedBatch, cuts: Cuts) -> tuple[Cuts, dict[str, NDArray[Any]]]:
    """Return the cut points of chats, and the additional columns of their index.

    A text may be cut between two of its tokens, but not between it and the end of its turn, so only
    cuts inside a text remain. The end of an assistant's turn replaces the cut within its 16 tokens.
    """
    starts, first, second = cuts
    own_starts, rows = [0], list[tuple[int, int, int]]()
    for document, chat in enumerate(batch.chats):
        base = int(batch.student.cu_tokens[document])
        own = slice(*starts[document : document + 2].tolist())
        pairs = zip(first[own].tolist(), second[own].tolist(), strict=True)
        offsets = batch.student.byte_offsets
        chosen = {
            i // CUT_STRIDE: (i, j, 0)
            for i, j in pairs
            if offsets[base + i, 1] > offsets[base + i, 0]
        }
        chosen |= {i // CUT_STRIDE: (i, j, 1) for i, j in chat.turns.tolist()}
        rows += sorted(chosen.values())
        own_starts.append(len(rows))
    table = np.array(rows, np.int64).reshape(-1, 3)
    columns: dict[str, NDArray[Any]] = {"cut_at_turn": table[:, 2].astype(np.uint32)}
    counts = np.array([_counts(chat) for chat in batch.chats], np.int64).reshape(-1, len(COUNTS))
    columns |= dict(zip(COUNTS, counts.T, strict=True))
    return (np.array(own_starts, np.int64), table[:, 0], table[:, 1]), columns


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
