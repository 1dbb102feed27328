"""A run's data, opened once: each dataset, which of its documents are read, and the conventions."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.conditions import WhereError
from pipeline.dataset.conventions import NOTHING, choose_conventions
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.selection import ChosenDocuments, select_documents
from pipeline.packing.mixture_file import MixedDataset, Mixture
from pipeline.packing.reading import LATEST, Reading
from pipeline.packing.rules import teacher_share
from pipeline.packing.state import StreamMismatchError, StreamState
from schemas.errors import DatasetError, ForeignTokenizerError
from schemas.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedDataset:
    """One dataset of a run, at one generation: how it is read, and which of its documents are."""

    entry: MixedDataset
    documents: ChosenDocuments

    @property
    def dataset(self) -> Dataset:
        """Its files."""
        return self.documents.dataset

    @property
    def fingerprint(self) -> str:
        """Of the generation that is open."""
        return self.dataset.manifest.fingerprint


@dataclass(frozen=True)
class OpenedRun:
    """What a run reads: the datasets of a mixture, in its order; one dataset is a mixture of one.

    `manifest` is the run's, with the tokens around a text that it names. `known` are fingerprints
    by number of the generations of each dataset, later ones too.
    """

    reading: Reading
    mixture: Mixture
    datasets: tuple[OpenedDataset, ...]
    manifest: Manifest
    known: tuple[Mapping[int, str], ...]

    @property
    def dataset(self) -> Dataset:
        """The dataset that represents all: its tokenizers are theirs, see `_stands_for_all`."""
        return _stands_for_all([each.dataset for each in self.datasets])

    @property
    def fingerprint(self) -> str:
        """64 hex digits: equal for runs that read the same rows, whatever names they use."""
        return _fingerprint(self.mixture, [each.fingerprint for each in self.datasets])

    @property
    def scores_digest(self) -> str:
        """64 hex digits of the losses by which documents are chosen; "" where by none."""
        digests = [each.documents.scores_digest for each in self.datasets]
        return sha256(json.dumps(digests).encode()).hexdigest() if any(digests) else ""

    @property
    def generations(self) -> tuple[int, ...]:
        """Of each dataset."""
        return tuple(each.dataset.manifest.generation for each in self.datasets)

    def moves_on(self, saved: StreamState) -> bool:
        """Return whether a run leaves the generations that its state is of for those that are open.

        Raises:
            StreamMismatchError: it would, and may not. Other data pass: they are compared later.
        """
        then = _fingerprint_at(self.mixture, self.known, saved)
        if not self.fingerprint != saved.fingerprint == then:
            return False
        path, now = self.mixture.path, _named(self.generations)
        if self.reading.generation != LATEST:
            raise StreamMismatchError(
                f"the checkpoint was made with generation {_named(saved.generations)} of "
                f"{path}, and generation {now} is open: pass the saved state to AlignedRows, which "
                f'opens its own, or give generation="{LATEST}" to move the run on'
            )
        logger.warning(
            "the run moves on to generation %s of %s: from here on its rows are different, so "
            "this epoch reads some documents twice and others not at all",
            *(now, path),
        )
        return True

    def require_no_overlap(self, documents: Sequence[NDArray[np.uint32]]) -> None:
        """Check that no document is read by two entries that are parts of one dataset.

        Documents, uint32 [G] of each, are those in its rows, some of them more than once.
        """
        for (first, own), (second, others) in combinations(
            zip(self.datasets, documents, strict=True), 2
        ):
            if first.fingerprint != second.fingerprint:
                continue
            shards = first.dataset.manifest.shards
            is_read = np.zeros(sum(shard.num_documents for shard in shards), np.bool_)
            is_read[own] = True
            num_twice = len(np.unique(others[is_read[others]]))
            if num_twice:
                raise DatasetError(
                    f'{self.mixture.path}: "{first.entry.name}" (where {first.entry.where}) and '
                    f'"{second.entry.name}" (where {second.entry.where}) are parts of one dataset '
                    f"and share {num_twice} documents, which would be read twice: make the "
                    "conditions exclude each other"
                )


def open_run(
    reading: Reading, saved: StreamState | None = None, *, seed: int = 0, max_epochs: int | None = 1
) -> OpenedRun:
    """Open what a run reads, each dataset once. A mixture's file has its own seed and `max_epochs`.

    Datasets that have grown since a resumed run recorded them in `saved` are opened as they were,
    unless the reading names a generation.

    Raises:
        DatasetError: one isn't a finished dataset, or is in the mixture twice without conditions
            that separate its documents, or two are generations of one dataset, or have other
            tokens around their texts, which the reading doesn't name.
        ForeignTokenizerError: one was made with different tokenizers from the first's.
        MixtureFileError: a file that can't be read, or contradicts itself.
        WhereError: a condition can't be understood; it lists the columns that there are.
        ValueError: no such token, or what a mixture can't have, see `Reading.mixture`.
    """
    mixture = reading.mixture(seed=seed, max_epochs=max_epochs)
    newest = [open_dataset(entry.path) for entry in mixture.datasets]
    known = tuple(dataset.manifest.fingerprints for dataset in newest)
    numbers = _choose_generations(reading, mixture, known, saved)
    datasets = [
        dataset.at_generation(number) for dataset, number in zip(newest, numbers, strict=True)
    ]
    entries = list(zip(mixture.datasets, datasets, strict=True))
    for first, second in combinations(entries, 2):
        _require_other_documents(mixture, first, second)
    for entry, dataset in entries[1:]:
        _require_tokenizers(mixture, entry.name, dataset, datasets[0])
        _require_conventions(reading, mixture, entry.name, dataset, datasets[0])
    opened = tuple(OpenedDataset(own[0], _select(mixture, *own)) for own in entries)
    manifest = choose_conventions(
        _stands_for_all(datasets),
        student_bos=reading.student_bos,
        student_eos=reading.student_eos,
        teacher_context=reading.teacher_context,
    )
    return OpenedRun(reading, mixture, opened, manifest, known)


def _stands_for_all(datasets: Sequence[Dataset]) -> Dataset:
    """Return the one with the most teacher tokens: `suggest_teacher_seq_length` then serves all."""
    return max(datasets, key=lambda dataset: teacher_share(dataset.manifest))


def _choose_generations(
    reading: Reading,
    mixture: Mixture,
    known: Sequence[Mapping[int, str]],
    saved: StreamState | None,
) -> list[int]:
    """Return which generation of each dataset is read."""
    if isinstance(reading.generation, int):
        return [reading.generation]
    newest = [max(numbers) for numbers in known]
    if saved is None or reading.generation == LATEST or list(saved.generations) == newest:
        return newest
    if _fingerprint_at(mixture, known, saved) != saved.fingerprint:
        return newest  # `AlignedRows.restore` says what differs
    logger.warning(
        "%s is at generation %s now; the run continues with generation %s, on which it was started "
        "(generation latest moves it to the newest)",
        mixture.path,
        *(_named(newest), _named(saved.generations)),
    )
    return list(saved.generations)


def _named(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _fingerprint_at(
    mixture: Mixture, known: Sequence[Mapping[int, str]], saved: StreamState
) -> str | None:
    """Return a run's fingerprint at the generations that were saved, None if there are none."""
    if len(saved.generations) != len(known):
        return None
    pairs = zip(known, saved.generations, strict=True)
    then = [numbers.get(number) for numbers, number in pairs]
    return _fingerprint(mixture, [each for each in then if each]) if all(then) else None


def _fingerprint(mixture: Mixture, datasets: Sequence[str]) -> str:
    if not mixture.names:
        return datasets[0]  # its seed, condition and epochs are compared, or free, on their own
    names = [entry.name for entry in mixture.datasets]
    told = {
        "seed": mixture.seed,
        "datasets": [
            [fingerprint, entry.max_epochs, entry.where]
            for entry, fingerprint in zip(mixture.datasets, datasets, strict=True)
        ],
        "stages": [
            [stage.from_tokens, [stage.weights.get(name, 0.0) for name in names]]
            for stage in mixture.stages
        ],
    }
    return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _select(mixture: Mixture, entry: MixedDataset, dataset: Dataset) -> ChosenDocuments:
    try:
        return select_documents(dataset, entry.where)
    except WhereError as error:
        if not entry.name:
            raise
        raise WhereError(f'{mixture.path}: "{entry.name}": {error}') from error


def _require_other_documents(
    mixture: Mixture, first: tuple[MixedDataset, Dataset], second: tuple[MixedDataset, Dataset]
) -> None:
    """Check that two datasets share no shards, unless they are parts of one by conditions."""
    (entry, dataset), (other_entry, other) = first, second
    is_one = dataset.manifest.fingerprint == other.manifest.fingerprint
    if is_one and entry.where and other_entry.where:
        return  # `require_no_overlap` compares their documents
    own, others = (
        {shard.sha256: shard.file for shard in each.manifest.shards if shard.num_documents}
        for each in (dataset, other)
    )
    shared = [file for digest, file in own.items() if digest in others]
    if shared:
        raise DatasetError(
            f'{mixture.path}: "{entry.name}" and "{other_entry.name}" share {len(shared)} shards, '
            f"such as {shared[0]}: they are one dataset, or generations of one, whose documents "
            'would be read twice: leave one out, or name the newest in both, each with a "where", '
            "so that no document matches both"
        )


def _require_tokenizers(mixture: Mixture, name: str, dataset: Dataset, first: Dataset) -> None:
    other = first.manifest
    try:
        dataset.manifest.require_tokenizers(
            student_sha256=other.student.sha256, teacher_sha256=other.teacher.sha256
        )
    except ForeignTokenizerError as error:
        raise ForeignTokenizerError(
            f'{mixture.path}: "{name}" and "{mixture.datasets[0].name}" differ: {error}'
        ) from error


def _require_conventions(
    reading: Reading, mixture: Mixture, name: str, dataset: Dataset, first: Dataset
) -> None:
    """Check that a dataset's texts have the first one's tokens around them, but for named ones."""
    student = (reading.student_bos, reading.student_bos, reading.student_eos)
    teacher = (reading.teacher_context, reading.teacher_context, NOTHING)
    for side, named in (("student", student), ("teacher", teacher)):
        own, other = (getattr(each.manifest, side).around_text for each in (dataset, first))
        for field, token in zip(asdict(own), named, strict=True):
            found, wanted = getattr(own, field), getattr(other, field)
            if token is None and found != wanted:
                raise DatasetError(
                    f"{mixture.path}: the {side}'s {field} is {found} in "
                    f'"{name}" and {wanted} in "{mixture.datasets[0].name}": name the tokens '
                    "around all texts, or align both with the same ones"
                )
