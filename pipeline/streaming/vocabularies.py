"""How two vocabularies meet in a run's data: tables of both, and cells counted on the data."""

import logging
from dataclasses import replace
from typing import Protocol

import numpy as np

from pipeline.dataset.files import Dataset
from pipeline.distributions.cells import NoSharedStartError, count_cells
from pipeline.distributions.sample import sample_documents
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.packing.opening import OpenedRun
from pipeline.packing.rules import PackingRules

logger = logging.getLogger(__name__)

_tables: dict[object, VocabularyMap] = {}
"""The tables of this process by tokenizers and conventions: a mixture's datasets share them."""
_counted: dict[object, VocabularyMap] = {}
"""The same with cells, by the data that they were counted on."""


class OpenedRows(Protocol):
    """As much of `AlignedRows` as says which data a run reads."""

    @property
    def opened(self) -> OpenedRun:
        """What is read."""

    @property
    def rules(self) -> PackingRules:
        """What a row is."""


def vocabulary_map(rows: OpenedRows) -> VocabularyMap:
    """Return what a run's two vocabularies mean to each other, made once in a process.

    Its cells are counted on a fixed part of the documents that the run reads, so they are the same
    on every rank, and when the run goes on.

    Raises:
        ValueError: a tokenizer whose tokens don't spell their text.
        DamagedShardError: an index is damaged.

    Example:
        >>> tables = vocabulary_map(rows)  # doctest: +SKIP
        >>> GuidedStudent(student, Method("distill"), vocabulary_map=tables)  # doctest: +SKIP
    """
    chosen = [each.documents for each in rows.opened.datasets]
    told = [(each.dataset.manifest.fingerprint, each.where, each.scores_digest) for each in chosen]
    dataset = rows.opened.dataset
    key = (*told, _key(dataset, rows.rules))
    if key not in _counted:
        tables = pair_tables(dataset, rows.rules)
        try:
            cells = count_cells(sample_documents(chosen), tables)
        except NoSharedStartError as error:
            logger.warning("%s: labels are learned by cross entropy alone", error)
            cells = np.arange(len(tables.tables.student_starts) - 1, dtype=np.int32)
        _counted[key] = replace(tables, cells=cells)
    return _counted[key]


def pair_tables(dataset: Dataset, rules: PackingRules) -> VocabularyMap:
    """Return the tables of a dataset's tokenizers, without cells; ValueError as above."""
    key = _key(dataset, rules)
    if key not in _tables:
        from pipeline.dataset.tokenizers import load_dataset_tokenizer  # rows alone need none

        _tables[key] = VocabularyMap.of(
            load_dataset_tokenizer(dataset, "student"),
            load_dataset_tokenizer(dataset, "teacher"),
            student_convention=rules.student,
            teacher_convention=rules.teacher,
            of_chats=dataset.manifest.chats is not None,
        )
    return _tables[key]


def _key(dataset: Dataset, rules: PackingRules) -> tuple[object, ...]:
    records = dataset.manifest.student, dataset.manifest.teacher
    files = [(record.sha256, record.special_strings) for record in records]
    return (*files, rules.student, rules.teacher, dataset.manifest.chats is not None)
