"""What stored teachers say in a row: losses, and next tokens over the student's vocabulary."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from pipeline.distributions.kernels import LabelEntries, RowFields
from pipeline.distributions.mapping import map_row
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.packing.rules import PackingRules
from pipeline.scoring.stored_teachers import StoredTeachers, heaviest
from pipeline.streaming.layout import DISTRIBUTION_FIELDS, RowLayout

_maps: dict[object, VocabularyMap] = {}
"""The tables of this process by tokenizers and conventions: a mixture's datasets share them."""


class RowAnswers:
    """Writes what stored teachers say of a row, int32 [layout.num_words], segment by segment."""

    def begin(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """Forget the row before; nothing of this one is written yet."""

    def segment(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        """Read what is stored of a segment.

        It holds these teacher tokens of its document at these places of the row, a context token's
        included. What is expected after a segment that ends its document is stored, too.
        """

    def finish(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """Write what needs the row's other fields, which are written now."""


class TeacherLosses(RowAnswers):
    """The losses of a row's teacher tokens."""

    def __init__(self, teachers: StoredTeachers) -> None:
        """Read what these have stored."""
        self._teachers = teachers

    def begin(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """See `RowAnswers`."""
        self._losses = layout.field(row, "teacher_losses")
        self._losses.fill(np.nan)

    def segment(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        """See `RowAnswers`."""
        # They come after the context token and, since no end token has one, end with the segment.
        own = slice(places[1] - (tokens[1] - tokens[0]), places[1])
        self._losses[own] = self._teachers.read(document_index, *tokens)


class NextTokens(RowAnswers):
    """What teachers expect at a row's places, and what that means for its labels."""

    def __init__(self, teachers: StoredTeachers, dataset: Dataset, rules: PackingRules) -> None:
        """Make or take the tables of a dataset's tokenizers, see `vocabulary_map`."""
        rule = teachers.rule.distributions
        assert rule is not None  # `open_teachers` was asked for some
        self._teachers = teachers
        self._map = vocabulary_map(dataset, rules)
        shape = (rules.teacher_seq_length, rule.width)
        self._draws = rule.draws
        self._ids = np.empty(shape, np.int32)
        self._log_probs = np.full(shape, -np.inf, np.float32)

    def begin(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """See `RowAnswers`."""
        self._ids.fill(-1)

    def segment(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        """See `RowAnswers`."""
        start, stop = tokens[0], tokens[1] + ends
        first = places[1] - (tokens[1] - tokens[0]) - 1
        if first < places[0]:  # no context token: nothing is expected before the first one
            start, first = start + 1, first + 1
        if start < stop:
            own = slice(first, first + stop - start)
            ids, log_probs = self._ids[own], self._log_probs[own]
            self._teachers.read_entries(document_index, start, ids=ids, log_probs=log_probs)

    def finish(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """See `RowAnswers`."""
        fields = RowFields(*(layout.field(row, name) for name in RowFields._fields))
        out = LabelEntries(*(layout.field(row, name) for name in DISTRIBUTION_FIELDS))
        map_row(fields, self._ids, self._log_probs, self._map, out, draws=self._draws)


class MeanOfDraws(RowAnswers):
    """The mean of teachers with draws, of which each is mapped alone, by its own losses.

    Equal entries are added up; draws stay apart, each as heavy as its teacher and its own share.
    """

    def __init__(self, teachers: StoredTeachers, dataset: Dataset, rules: PackingRules) -> None:
        """See `NextTokens`."""
        self._weights = np.array(teachers.rule.weights, np.float32)
        self._parts = [
            (TeacherLosses(each), NextTokens(each, dataset, rules)) for each in teachers.apart
        ]

    def begin(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """See `RowAnswers`."""
        count = len(self._parts)
        self._layout = replace(layout, top_k=layout.top_k // count, draws=layout.draws // count)
        self._rows = np.empty((count, self._layout.num_words), np.int32)
        for own, answers in zip(self._rows, self._parts, strict=True):
            for each in answers:
                each.begin(own, self._layout)

    def segment(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        """See `RowAnswers`."""
        for answers in self._parts:
            for each in answers:
                each.segment(document_index, tokens, places, ends=ends)

    def finish(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """See `RowAnswers`."""
        given = slice(layout.words["teacher_losses"].start)
        self._rows[:, given] = row[given]
        for own, (_, tokens) in zip(self._rows, self._parts, strict=True):
            tokens.finish(own, self._layout)
        ids, probs, moved = (
            np.stack([self._layout.field(own, name) for own in self._rows], 1)
            for name in DISTRIBUTION_FIELDS
        )
        probs *= self._weights[:, None]
        out = LabelEntries(*(layout.field(row, name) for name in DISTRIBUTION_FIELDS))
        out.moved[:] = moved @ self._weights
        cut, num_exact = self._layout.top_k - self._layout.draws, layout.top_k - layout.draws
        exact, masses = (each[:, :, :cut].reshape(len(ids), -1) for each in (ids, probs))
        out.ids[:, :num_exact], log_masses = heaviest(exact, masses, num_exact)
        out.probs[:, :num_exact] = np.exp(log_masses)
        out.ids[:, num_exact:] = ids[:, :, cut:].reshape(len(ids), -1)
        out.probs[:, num_exact:] = probs[:, :, cut:].reshape(len(ids), -1)
        # Where one says nothing, its share of the mass could be anywhere.
        is_silent = (ids[:, :, 0] < 0).any(1)
        out.ids[is_silent], out.probs[is_silent], out.moved[is_silent] = -1, 0, 0


def vocabulary_map(dataset: Dataset, rules: PackingRules) -> VocabularyMap:
    """Return the tables of a dataset's tokenizers, made once in a process.

    Raises:
        ValueError: a tokenizer whose tokens don't spell their text.

    Example:
        >>> tables = vocabulary_map(rows.dataset, rows.rules)  # doctest: +SKIP
        >>> GuidedStudent(student, Method("distill"), vocabulary_map=tables)  # doctest: +SKIP
    """
    records = dataset.manifest.student, dataset.manifest.teacher
    files = [(record.sha256, record.special_strings) for record in records]
    key = (*files, rules.student, rules.teacher)
    if key not in _maps:
        from pipeline.dataset.tokenizers import load_dataset_tokenizer  # rows alone need none

        _maps[key] = VocabularyMap.of(
            load_dataset_tokenizer(dataset, "student"),
            load_dataset_tokenizer(dataset, "teacher"),
            student_convention=rules.student,
            teacher_convention=rules.teacher,
        )
    return _maps[key]
