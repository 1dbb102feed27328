"""The left context in which a teacher sees each token, for every way of scoring.

Two losses of a token agree only if their contexts do. Rows split a long document into *pieces*, and
tokens don't see those before their piece: 10 teacher tokens in rows of 4 make pieces 0…3, 4…7 and
8…9. Their digests show whether stored losses fit a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.packing.kernels import STARTS
from pipeline.packing.plan import RowPlan, split_index
from pipeline.packing.rules import PackingRules
from schemas.errors import DatasetError
from schemas.index import ShardIndex


@dataclass(frozen=True, eq=False)
class Pieces:
    """P runs of teacher tokens that are scored together, in the order of documents.

    Each `continues` its document after a split, or begins it.
    """

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    continues: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.document)

    def of_documents(self, wanted: NDArray[np.bool_]) -> Pieces:
        """Return the pieces of wanted documents, [N], which keep their numbers."""
        own = wanted[self.document]
        return Pieces(*(getattr(self, entry.name)[own] for entry in fields(self)))

    @property
    def num_split_documents(self) -> int:
        """Documents of more than one piece."""
        return len(np.unique(self.document[self.continues]))

    @property
    def context_sha256(self) -> str:
        """64 hex digits; equal if every token has the same left context."""
        return _digest(self.document[self.continues], self.start[self.continues])


@dataclass(frozen=True, kw_only=True)
class ContextRule:
    """Where the left context of each teacher token starts: where rows split documents.

    `first_token_id` comes before a document, whose first token otherwise has no loss, and
    `continued_token_id` before its later pieces. `student_added_tokens` is from
    `PackingRules.student_room`.
    """

    seq_length: int
    teacher_seq_length: int
    first_token_id: int | None
    continued_token_id: int | None
    student_added_tokens: tuple[int, int, int]

    @classmethod
    def of_rows(cls, rules: PackingRules) -> ContextRule:
        """Return the rule by which an online teacher scores rows.

        ValueError if the teacher's convention has an end token, whose loss is never stored.
        """
        teacher = rules.teacher
        if teacher.end_token_id is not None:
            raise ValueError(
                f"the teacher's convention adds token {teacher.end_token_id} after a document; "
                "stored losses are those of the text's own tokens: leave it out"
            )
        return cls(
            teacher_seq_length=rules.teacher_seq_length,
            first_token_id=teacher.first_token_id,
            continued_token_id=teacher.continued_token_id,
            seq_length=rules.seq_length,
            student_added_tokens=rules.student_room[1:],
        )

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ContextRule:
        """Read a rule from `to_json`; DatasetError if invalid."""
        try:
            values = dict(body)
            if values.pop("stride") is not None:
                raise ValueError("windows with a stride")
            return cls(**{**values, "student_added_tokens": tuple(values["student_added_tokens"])})
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(
                f"not a context rule ({error!r}): the score manifest was altered; run "
                "vocag score again"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with a null stride for rows."""
        added = list(self.student_added_tokens)
        return {**asdict(self), "student_added_tokens": added, "stride": None}

    def describe(self) -> str:
        """Return the rule in words."""
        return f"rows of {self.seq_length} student and {self.teacher_seq_length} teacher tokens"

    def describe_around(self) -> str:
        """Return the number of tokens around a student's text, in words."""
        first, continued, end = self.student_added_tokens
        return f"{first} token before a text, {continued} before its rest and {end} after it"

    def context_token(self, *, continues: bool) -> int | None:
        """Return the id before a piece, None for nothing."""
        return self.continued_token_id if continues else self.first_token_id

    def pieces(self, index: ShardIndex) -> Pieces:
        """Return the pieces of a shard's documents; they cover every token."""
        added = (int(token is not None) for token in (self.first_token_id, self.continued_token_id))
        student_room = (self.seq_length, *self.student_added_tokens)
        teacher_room = (self.teacher_seq_length, *added, 0)
        segments = split_index(index, student_room=student_room, teacher_room=teacher_room)
        return _of_segments(segments)


def plan_contexts(plan: RowPlan) -> list[str]:
    """Return each shard's `Pieces.context_sha256` in a plan's rows."""
    # A plan may hold tens of millions of segments, of which few continue a document.
    continuing = plan.segments[(plan.segments["flags"] & STARTS) == 0]
    order = np.lexsort((continuing["teacher_start"], continuing["document"]))
    pieces = _of_segments(continuing[order])
    firsts = plan.shard_document_starts
    bounds = np.searchsorted(pieces.document, firsts).tolist()
    return [
        _digest(pieces.document[start:stop] - first, pieces.start[start:stop])
        for (start, stop), first in zip(pairwise(bounds), firsts, strict=False)
    ]


def _of_segments(segments: NDArray[np.void]) -> Pieces:
    """Return the teacher's side of segments, without empty ones.

    After an empty first segment, the next one still continues its document.
    """
    segments = segments[segments["teacher_stop"] > segments["teacher_start"]]
    return Pieces(
        document=segments["document"].astype(np.int64),
        start=segments["teacher_start"].astype(np.int64),
        stop=segments["teacher_stop"].astype(np.int64),
        continues=(segments["flags"] & STARTS) == 0,
    )


def _digest(documents: NDArray[np.int64], starts: NDArray[np.int64]) -> str:
    # In the format, a piece starts twice: where it is seen from, and where it is scored from.
    return sha256(np.stack([documents, starts, starts], axis=1).astype("<i8").tobytes()).hexdigest()
