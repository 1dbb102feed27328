"""Stored distributions in a row, over the student's vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from pipeline.distributions.kernels import RowFields
from pipeline.distributions.mapping import map_row
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.packing.rules import PackingRules
from pipeline.scoring.combined_losses import CombinedLosses
from pipeline.scoring.stored_losses import StoredLosses
from pipeline.streaming.layout import RowLayout

_maps: dict[object, VocabularyMap] = {}
"""The tables of this process by tokenizers and conventions: a mixture's datasets share them."""


class NextTokens:
    """Reads what a teacher expects at a row's places, and writes what that means for its labels.

    Attributes:
        top_k: entries of a distribution.
    """

    def __init__(
        self, losses: StoredLosses | CombinedLosses, dataset: Dataset, rules: PackingRules
    ) -> None:
        """Make or take the tables of a dataset's tokenizers.

        Raises:
            ValueError: a tokenizer whose tokens don't spell their text.
        """
        rule = losses.rule.distributions
        assert rule is not None  # `open_teachers` was asked for some
        self.top_k = rule.top_k
        self._losses = losses
        self._map = vocabulary_map(dataset, rules)
        shape = (rules.teacher_seq_length, self.top_k)
        self._ids = np.empty(shape, np.int32)
        self._log_probs = np.full(shape, -np.inf, np.float32)

    def begin_row(self) -> None:
        """Forget the row before."""
        self._ids.fill(-1)

    def read(
        self, document_index: int, tokens: tuple[int, int], places: tuple[int, int], *, ends: bool
    ) -> None:
        """Read what a teacher expects after its tokens of a segment.

        Args:
            document_index: of the segment's document.
            tokens: the teacher's tokens of the document that the segment holds.
            places: of the segment in the row, a context token's included.
            ends: whether the segment ends its document: what is expected then is stored, too.
        """
        start, stop = tokens[0], tokens[1] + ends
        first = places[1] - (tokens[1] - tokens[0]) - 1
        if first < places[0]:  # no context token: nothing is expected before the first one
            start, first = start + 1, first + 1
        if start < stop:
            own = slice(first, first + stop - start)
            self._losses.read_entries(
                document_index, start, stop, ids=self._ids[own], log_probs=self._log_probs[own]
            )

    def write(self, row: NDArray[np.int32], layout: RowLayout) -> None:
        """Write a row's distributions behind its other fields.

        Args:
            row: int32 [layout.num_words], its other fields written.
            layout: of the row.
        """
        fields = {name: layout.field(row, name) for name in RowFields._fields}
        out = (layout.field(row, name) for name in ("next_token_ids", "next_token_probs"))
        map_row(fields, self._ids, self._log_probs, self._map, *out)


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
