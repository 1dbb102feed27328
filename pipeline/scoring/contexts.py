"""With which left context a teacher sees each token: the one place, for every way of scoring.

A loss is `-log P(token | context)`, so two losses of a token agree only where their contexts do.
Training rows give every document its own context, and a document that is longer than a row is
split; the tokens after a split don't see what lies before it. `ContextRule` says where contexts
start, as *pieces* of documents; `context_sha256` says it in 64 digits, so that losses that were
computed earlier can be held against a plan of rows without reading either.

    a document of 10 teacher tokens, rows of 4        windows of 4 that advance by 3
    piece 0   sees and scores 0…3                     sees and scores 0…3
    piece 1   sees and scores 4…7                     sees 3…6, scores 4…6
    piece 2   sees and scores 8…9                     sees 6…9, scores 7…9
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.packing.plan import STARTS, RowPlan, split_index
from pipeline.packing.rules import Convention, PackingRules
from schemas.errors import DatasetError
from schemas.index import ShardIndex
from schemas.manifest import Manifest


@dataclass(frozen=True, eq=False)
class Pieces:
    """P runs of teacher tokens that are scored together, in the order of a shard's documents.

    Attributes:
        document: int64 [P], number in the shard.
        start: int64 [P], the first teacher token that the teacher sees.
        scored_from: int64 [P], the first one whose loss is taken from this piece.
        stop: int64 [P], where both end.
        continues: bool [P], whether the document goes on here, after a split.
    """

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    scored_from: NDArray[np.int64]
    stop: NDArray[np.int64]
    continues: NDArray[np.bool_]

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self.document)

    def of_documents(self, wanted: NDArray[np.bool_]) -> Pieces:
        """Return the pieces of some documents, which keep their numbers.

        Args:
            wanted: bool [N], by number in the shard.
        """
        own = wanted[self.document]
        return Pieces(*(getattr(self, entry.name)[own] for entry in fields(self)))

    @property
    def num_split_documents(self) -> int:
        """Documents of more than one piece."""
        return len(np.unique(self.document[self.continues]))

    @property
    def context_sha256(self) -> str:
        """64 hex digits; equal where every token has the same left context."""
        return _digest(*(a[self.continues] for a in (self.document, self.start, self.scored_from)))


@dataclass(frozen=True, kw_only=True)
class ContextRule:
    """Where the left context of each teacher token starts.

    Attributes:
        teacher_seq_length: most tokens that the teacher sees at once, the context token included.
        first_token_id: stands before a document's first token, None for nothing: then that token
            has no loss.
        continued_token_id: stands before a piece that continues a document.
        seq_length: student tokens per row; documents are split as rows split them. None: windows.
        student_added_tokens: how many tokens the rows add to the student's side of a segment that
            starts, continues or ends a document; they take room. None: windows.
        stride: teacher tokens by which each window advances; None: rows.

    Raises:
        ValueError: neither rows nor windows, or windows without overlap.
    """

    teacher_seq_length: int
    first_token_id: int | None
    continued_token_id: int | None
    seq_length: int | None = None
    student_added_tokens: tuple[int, int, int] | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        """Check that it is one of the two."""
        rows = self.seq_length is not None and self.student_added_tokens is not None
        if rows == (self.stride is not None):
            raise ValueError(
                f"a context rule has either seq_length and student_added_tokens (rows) or stride "
                f"(windows), not seq_length {self.seq_length} and stride {self.stride}"
            )
        if self.stride is not None and not 1 <= self.stride < self._room(continued=True):
            raise ValueError(
                f"stride {self.stride} is not in 1 … {self._room(continued=True) - 1}: windows of "
                f"{self.teacher_seq_length} tokens must overlap; half of them is usual"
            )

    @classmethod
    def of_rows(cls, rules: PackingRules) -> ContextRule:
        """Return the rule by which an online teacher scores rows.

        Raises:
            ValueError: the teacher's convention ends documents with a token; it is no token of
                the text, so no loss of it is stored and none is ever used.

        Example:
            >>> ContextRule.of_rows(PackingRules.of_dataset(manifest, seq_length=2048))
        """
        teacher = rules.teacher
        if teacher.end_token_id is not None:
            raise ValueError(
                f"the teacher's convention adds token {teacher.end_token_id} after a document; "
                "stored losses are those of the text's own tokens: use a Convention with "
                "end_token_id None"
            )
        return cls(
            teacher_seq_length=rules.teacher_seq_length,
            first_token_id=teacher.first_token_id,
            continued_token_id=teacher.continued_token_id,
            seq_length=rules.seq_length,
            student_added_tokens=rules.student.added_tokens,
        )

    @classmethod
    def of_dataset(
        cls,
        manifest: Manifest,
        *,
        seq_length: int | None = None,
        teacher_seq_length: int | None = None,
        stride: int | None = None,
    ) -> ContextRule:
        """Return the rule that lengths alone decide, conventions as rows have them by default.

        Args:
            manifest: the dataset's.
            seq_length: student tokens per row; None with `stride`.
            teacher_seq_length: teacher tokens per row or window; None: rows' default.
            stride: for windows; needs `teacher_seq_length`.

        Raises:
            ValueError: lengths or a stride that no rule can have.

        Example:
            >>> ContextRule.of_dataset(manifest, seq_length=2048).describe()
            'rows of 2048 student and 1984 teacher tokens'
        """
        if seq_length is not None:
            return cls.of_rows(
                PackingRules.of_dataset(
                    manifest, seq_length=seq_length, teacher_seq_length=teacher_seq_length
                )
            )
        if teacher_seq_length is None:
            raise ValueError(f"stride {stride} needs teacher_seq_length, the tokens of a window")
        convention = Convention.of_tokenizer(manifest.teacher, ends=False)
        return cls(
            teacher_seq_length=teacher_seq_length,
            first_token_id=convention.first_token_id,
            continued_token_id=convention.continued_token_id,
            stride=stride,
        )

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ContextRule:
        """Return the rule that `to_json` gave.

        Raises:
            DatasetError: fields missing or contradicting each other.
        """
        try:
            added = body["student_added_tokens"]
            return cls(**{**body, "student_added_tokens": None if added is None else tuple(added)})
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(
                f"no context rule ({error!r}): the score manifest was altered; run "
                "beam_jobs.score again"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        added = self.student_added_tokens
        return {**asdict(self), "student_added_tokens": None if added is None else list(added)}

    def describe(self) -> str:
        """Return the rule in words.

        Example:
            >>> rule.describe()
            'rows of 2048 student and 1984 teacher tokens'
        """
        if self.stride is not None:
            return f"windows of {self.teacher_seq_length} tokens that advance by {self.stride}"
        return f"rows of {self.seq_length} student and {self.teacher_seq_length} teacher tokens"

    def context_token(self, *, continues: bool) -> int | None:
        """Return the id that stands before a piece, None for nothing."""
        return self.continued_token_id if continues else self.first_token_id

    def pieces(self, index: ShardIndex) -> Pieces:
        """Return the pieces in which a shard's documents are scored; every token in one of them.

        Example:
            >>> rule.pieces(index).stop.tolist()
            [4, 8, 10]
        """
        if self.stride is not None:
            return _windows(self, index.num_teacher_tokens)
        assert self.seq_length is not None
        assert self.student_added_tokens is not None
        segments = split_index(
            index,
            student_room=(self.seq_length, *self.student_added_tokens),
            teacher_room=(
                self.teacher_seq_length,
                int(self.first_token_id is not None),
                int(self.continued_token_id is not None),
                0,
            ),
        )
        return _of_segments(segments)

    def _room(self, *, continued: bool) -> int:
        """Return the text's tokens that fit beside the context token."""
        return self.teacher_seq_length - int(self.context_token(continues=continued) is not None)


def plan_contexts(plan: RowPlan) -> list[str]:
    """Return each shard's `Pieces.context_sha256` as an online teacher would see a plan's rows."""
    # A plan may hold tens of millions of segments, of which few continue a document.
    continuing = plan.segments[(plan.segments["flags"] & STARTS) == 0]
    order = np.lexsort((continuing["teacher_start"], continuing["document"]))
    pieces = _of_segments(continuing[order])
    bounds = np.searchsorted(pieces.document, plan.shard_document_starts)
    return [
        _digest(pieces.document[own] - first, pieces.start[own], pieces.scored_from[own])
        for own, first in zip(_slices(bounds), plan.shard_document_starts, strict=False)
    ]


def _of_segments(segments: NDArray[np.void]) -> Pieces:
    """Return the teacher's side of segments; those without a teacher token have nothing to score.

    Where a document's first segment is such a one, the next still counts as a continuation: rows
    put the continuing context token there.
    """
    segments = segments[segments["teacher_stop"] > segments["teacher_start"]]
    start = segments["teacher_start"].astype(np.int64)
    return Pieces(
        document=segments["document"].astype(np.int64),
        start=start,
        scored_from=start,
        stop=segments["teacher_stop"].astype(np.int64),
        continues=(segments["flags"] & STARTS) == 0,
    )


def _windows(rule: ContextRule, num_tokens: NDArray[np.int64]) -> Pieces:
    first_room, room = rule._room(continued=False), rule._room(continued=True)
    assert rule.stride is not None
    rows: list[tuple[int, int, int, int]] = []
    for document, length in enumerate(num_tokens.tolist()):
        start, scored = 0, 0
        stop = min(length, first_room)
        while scored < length:
            if stop > scored:
                rows.append((document, start, scored, stop))
            scored = stop
            start += rule.stride
            stop = min(length, start + room)
    table = np.array(rows, np.int64).reshape(-1, 4)
    document, start, scored_from, stop = np.ascontiguousarray(table.T)
    return Pieces(document, start, scored_from, stop, start > 0)


def _digest(*columns: NDArray[np.int64]) -> str:
    return sha256(np.stack(columns, axis=1).astype("<i8").tobytes()).hexdigest()


def _slices(bounds: NDArray[np.int64]) -> Iterator[slice]:
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield slice(start, stop)
