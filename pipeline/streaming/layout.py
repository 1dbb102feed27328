"""The fields of a row, described by `Rows`, as places in one int32 array."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.streaming.kernels import NUM_QUARANTINED
from schemas.distribution_rule import NO_ENTRIES, EntryShape

DISTRIBUTION_FIELDS = ("next_token_ids", "next_token_probs", "own_token_ids")
"""Fields of labels' distributions, in the order of `LabelEntries`."""

FLOAT_FIELDS = ("loss_mask", "teacher_losses", "next_token_probs")
"""Fields whose words are float32."""


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row.

    `entries` is the shape of a label's distribution, of width 0 without any; `sources` are a
    mixture's datasets; chats are learned in part.
    """

    seq_length: int
    teacher_seq_length: int
    max_segments: int
    with_losses: bool = False
    entries: EntryShape = NO_ENTRIES
    sources: tuple[str, ...] = ()
    of_chats: bool = False

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each field's shape, in buffer order."""
        student, teacher = (self.seq_length,), (self.teacher_seq_length,)
        # One more place for where the padding starts, one for where it ends.
        bounds = (self.max_segments + 2,)
        shapes: dict[str, tuple[int, ...]] = {
            "input_ids": student,
            "labels": student,
            "loss_mask": student,
            "position_ids": student,
            "teacher_spans": (self.seq_length, 2),
            "teacher_input_ids": teacher,
            "teacher_position_ids": teacher,
            "cu_seqlens": bounds,
            "teacher_cu_seqlens": bounds,
            "num_quarantined_tokens": (),
        }
        # Last, so the kernels' fields keep their places.
        shapes |= {"teacher_losses": teacher} if self.with_losses else {}
        if self.entries.width:
            entries = (self.seq_length, self.entries.width)
            shapes |= dict(zip(DISTRIBUTION_FIELDS, (entries, entries, student), strict=True))
        return shapes | ({"source": ()} if self.sources else {})

    @cached_property
    def words(self) -> dict[str, slice]:
        """Each field's slice."""
        bounds = np.cumsum([0, *map(math.prod, self.shapes.values())]).tolist()
        return dict(zip(self.shapes, map(slice, bounds, bounds[1:]), strict=True))

    @cached_property
    def num_words(self) -> int:
        """int32 words of a row."""
        return sum(map(math.prod, self.shapes.values()))

    def field(self, row: NDArray[np.int32], name: str) -> NDArray[Any]:
        """Return a view of a field."""
        words = row[self.words[name]]
        words = words.view(np.float32) if name in FLOAT_FIELDS else words
        return words.reshape(self.shapes[name])

    @cached_property
    def kernel_starts(self) -> tuple[int, ...]:
        """First words of the ten fields that kernels write."""
        return tuple(words.start for words in self.words.values())[: NUM_QUARANTINED + 1]
