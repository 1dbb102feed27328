"""Open a run's data: datasets, chosen documents, conventions."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.chosen_documents import ChosenDocuments, select_documents
from pipeline.dataset.conditions import WhereError
from pipeline.dataset.conventions import NOTHING, choose_conventions
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.packing.mixture_file import MixedDataset, Mixture
from pipeline.packing.reading import LATEST, Reading
from pipeline.packing.rules import teacher_share
from pipeline.packing.state import StreamMismatchError, StreamState
from schemas.errors import DatasetError, ForeignTokenizerError
from schemas.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset at one generation, with its chosen documents."""

    entry: MixedDataset
    documents: ChosenDocuments

    @property
    def dataset(self) -> Dataset:
        """Its files."""
        return self.documents.dataset

    @property
    def fingerprint(self) -> str:
        """The open generation's."""
        return self.dataset.manifest.fingerprint


@dataclass(frozen=True)
class OpenedRun:
    """A run's data: one dataset, or a mixture's in order.

    `manifest` has the run's tokens around texts; `known` each dataset's fingerprints by generation.
    """

    reading: Reading
    mixture: Mixture
    datasets: tuple[OpenedDataset, ...]
    manifest: Manifest
    known: tuple[Mapping[int, str], ...]

    @property
    def dataset(self) -> Dataset:
        """The dataset whose tokenizers all share."""
        return _stands_for_all([each.dataset for each in self.datasets])

    @property
    def fingerprint(self) -> str:
        """64 hex digits, equal for runs that read the same rows."""
        return _fingerprint(self.mixture, [each.fingerprint for each in self.datasets])

    @property
    def scores_digest(self) -> str:
        """64 hex digits of the losses that conditions use; "" without any."""
        digests = [each.documents.scores_digest for each in self.datasets]
        return sha256(json.dumps(digests).encode()).hexdigest() if any(digests) else ""

    @property
    def generations(self) -> tuple[int, ...]:
        """Each dataset's."""
        return tuple(each.dataset.manifest.generation for each in self.datasets)

    def moves_on(self, saved: StreamState) -> bool:
        """Whether a run moves from its saved generations to the opened ones.

        Raises:
            StreamMismatchError: it would, but the reading doesn't name the latest.
        """
        then = _fingerprint_at(self.mixture, self.known, saved)
        if not self.fingerprint != saved.fingerprint == then:
            return False
        path, now = self.mixture.path, _named(self.generations)
        if self.reading.generation != LATEST:
            raise StreamMismatchError(
                f"the checkpoint was made with generation {_named(saved.generations)} of "
                f"{path}, and generation {now} is open: pass the saved state to AlignedRows or "
                "open_training, which open its own (GuidedTrainer finds it by "
                "TrainingArguments.resume_from_checkpoint), or give "
                f'generation="{LATEST}" to move the run on'
            )
        logger.warning(
            "the run moves on to generation %s of %s: from here on its rows are different, so "
            "this epoch reads some documents twice and others not at all",
            *(now, path),
        )
        return True

    def require_no_overlap(self, documents: Sequence[NDArray[np.uint32]]) -> None:
        """Check that parts of one dataset share no document of `documents`; else DatasetError."""
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
    """Open a run's data, each dataset once.

    `seed` and `max_epochs` are for a single dataset; a mixture's file has its own. Grown datasets
    are opened at the generations in `saved`, unless the reading names one.

    Raises:
        DatasetError: an unfinished dataset; a mixture that reads documents twice, or has different
            tokens around texts that the reading doesn't name.
        ForeignTokenizerError: datasets have different tokenizers.
        MixtureFileError: the file is invalid.
        WhereError: an invalid condition; the message lists the columns.
        ValueError: an unknown token; also as in `Reading.mixture`.
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
    """Return the dataset whose suggested teacher length serves all."""
    return max(datasets, key=lambda dataset: teacher_share(dataset.manifest))


def _choose_generations(
    reading: Reading,
    mixture: Mixture,
    known: Sequence[Mapping[int, str]],
    saved: StreamState | None,
) -> list[int]:
    if isinstance(reading.generation, int):
        return [reading.generation]
    newest = [max(numbers) for numbers in known]
    if saved is None or reading.generation == LATEST or list(saved.generations) == newest:
        return newest
    if _fingerprint_at(mixture, known, saved) != saved.fingerprint:
        return newest  # `AlignedRows.restore` reports the difference
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
    """Return a run's fingerprint at the saved generations; None if unknown."""
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
    if (dataset.manifest.chats is None) != (first.manifest.chats is None):
        raise DatasetError(
            f'{mixture.path}: of "{name}" and "{mixture.datasets[0].name}" one holds conversations '
            "and one texts, which begin and end in other ways: train on one after the other, or "
            "align both as conversations"
        )
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
