"""Stored teachers' answers in a row: losses, and the student's next tokens."""

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from pipeline.distributions.kernels import Entries, LabelEntries
from pipeline.distributions.mapping import empty_entries, map_row
from pipeline.distributions.walk import RowFields
from pipeline.packing.rules import PackingRules
from pipeline.scoring.stored_teachers import StoredTeachers
from pipeline.streaming.layout import DISTRIBUTION_FIELDS, RowLayout
from pipeline.streaming.vocabularies import pair_tables


class RowAnswers:
    """Writes stored teachers' answers into a row, by segment."""

    def begin(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """Start a row, not yet written."""

    def segment(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        """Read the answers to `tokens` of a document.

        `places` in the row include a context token's. After a document that `ends`, an expectation
        is stored, too.
        """

    def finish(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """Write fields that depend on the row's others."""


class TeacherLosses(RowAnswers):
    """The losses of a row's teacher tokens."""

    def __init__(self, teachers: StoredTeachers) -> None:
        """Read these teachers'."""
        self._teachers = teachers

    def begin(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """See `RowAnswers`."""
        self._losses = layout.field(row, "teacher_losses")
        self._losses.fill(np.nan)

    def segment(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        """See `RowAnswers`."""
        self._losses[_own_places(tokens, places)] = self._teachers.read(document_index, *tokens)


class NextTokens(RowAnswers):
    """Teachers' expectations at a row's places, mapped to its labels.

    A mean's teachers are mapped each by its own losses; a row has all their entries, weighted by
    their shares, exact ones before draws.
    """

    def __init__(self, teachers: StoredTeachers, dataset: Dataset, rules: PackingRules) -> None:
        """Make or reuse `pair_tables`."""
        self._map = pair_tables(dataset, rules)
        self._parts = [_Expected(each, rules) for each in teachers.apart]
        self._shares = teachers.rule.weights or (1.0,)

    def begin(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """See `RowAnswers`."""
        for part in self._parts:
            part.ids.fill(-1)
            part.losses.fill(np.nan)

    def segment(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        """See `RowAnswers`."""
        for part in self._parts:
            part.read(document_index, tokens, places, ends=ends)
            if len(self._parts) > 1:
                part.read_losses(document_index, tokens, places)

    def finish(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """See `RowAnswers`."""
        fields = {name: layout.field(row, name) for name in RowFields._fields}
        out = LabelEntries(*(layout.field(row, name) for name in DISTRIBUTION_FIELDS))
        if len(self._parts) == 1:
            (part,) = self._parts
            map_row(RowFields(**fields), part.entries(), self._map, out)
            return
        exact, drawn, silent = 0, layout.entries.exact, np.zeros(len(out.ids), np.bool_)
        for part, share in zip(self._parts, self._shares, strict=True):
            own = empty_entries(len(out.ids), part.shape.width)
            known = RowFields(**fields | {"teacher_losses": part.losses})
            map_row(known, part.entries(), self._map, own)
            for first, columns in (
                (exact, slice(0, part.shape.exact)),
                (drawn, slice(part.shape.exact, part.shape.width)),
            ):
                place = slice(first, first + columns.stop - columns.start)
                out.ids[:, place] = own.ids[:, columns]
                out.probs[:, place] = own.probs[:, columns] * np.float32(share)
            exact, drawn = exact + part.shape.exact, drawn + part.shape.drawn
            out.own_ids[:] = own.own_ids
            silent |= own.ids[:, 0] < 0
        # Without one's entries, its share of the mass could be anywhere.
        out.ids[silent], out.probs[silent], out.own_ids[silent] = -1, 0, -1


class _Expected:
    def __init__(self, teacher: StoredTeachers, rules: PackingRules) -> None:
        shape = teacher.rule.shape
        assert shape is not None  # `open_teachers` was asked for some
        self.shape = shape
        self._teacher = teacher
        self.losses = np.empty(rules.teacher_seq_length, np.float32)
        self.ids = np.empty((rules.teacher_seq_length, shape.width), np.int32)
        self._log_probs = np.full(self.ids.shape, -np.inf, np.float32)

    def read(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        start, stop = tokens[0], tokens[1] + ends
        first = places[1] - (tokens[1] - tokens[0]) - 1
        if first < places[0]:  # no context token: nothing is expected before the first one
            start, first = start + 1, first + 1
        if start < stop:
            own = slice(first, first + stop - start)
            ids, log_probs = self.ids[own], self._log_probs[own]
            self._teacher.read_entries(document_index, start, ids=ids, log_probs=log_probs)

    def read_losses(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int]
    ) -> None:
        self.losses[_own_places(tokens, places)] = self._teacher.read(document_index, *tokens)

    def entries(self) -> Entries:
        return Entries(self.ids, np.exp(self._log_probs), self.shape.exact)


def _own_places(tokens: tuple[int, int], places: tuple[int, int]) -> slice:
    # They come after the context token and, since no end token has a loss, end with the segment.
    return slice(places[1] - (tokens[1] - tokens[0]), places[1])
