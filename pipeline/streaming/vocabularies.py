"""Tables of a run's two vocabularies, and cells counted on its data."""

import logging
from dataclasses import replace
from typing import Protocol

from pipeline.dataset.files import Dataset
from pipeline.distributions.cells import NoSharedStartError, count_cells
from pipeline.distributions.sample import sample_documents
from pipeline.distributions.vocabulary_map import CellTables, VocabularyMap
from pipeline.packing.opening import OpenedRun
from pipeline.packing.rules import PackingRules

logger = logging.getLogger(__name__)

_tables: dict[object, VocabularyMap] = {}
"""The tables of this process by tokenizers and conventions: a mixture's datasets share them."""
_counted: dict[object, VocabularyMap] = {}
"""The same with cells, by the data that they were counted on."""


class OpenedRows(Protocol):
    """The part of `AlignedRows` that identifies its data."""

    @property
    def opened(self) -> OpenedRun:
        """The data."""

    @property
    def rules(self) -> PackingRules:
        """A row's shape."""


def vocabulary_map(rows: OpenedRows) -> VocabularyMap:
    """Return the map between a run's two vocabularies, made once per process.

    Its cells are counted on a fixed part of the documents, so they are equal on every rank and
    after a restart.

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
            cells = CellTables.unjoined(len(tables.tables.student_starts) - 1)
        _counted[key] = replace(tables, cells=cells)
    return _counted[key]


def pair_tables(dataset: Dataset, rules: PackingRules) -> VocabularyMap:
    """Return a dataset's tokenizer tables without cells; ValueError as in `vocabulary_map`."""
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
