"""The datasets of a mixture: opened, and refused where they can't be trained on together."""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import combinations, zip_longest

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.conditions import WhereError
from pipeline.dataset.conventions import choose_conventions
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.selection import ChosenDocuments, select_documents
from pipeline.packing.mixture_file import MixedDataset, Mixture, is_mixture, read_mixture
from pipeline.packing.rules import (
    Convention,
    PackingRules,
    suggest_teacher_seq_length,
    teacher_share,
)
from schemas.errors import DatasetError, ForeignTokenizerError


def open_datasets(mixture: Mixture, generations: Sequence[int] = ()) -> tuple[Dataset, ...]:
    """Return a mixture's datasets, in the file's order.

    Args:
        mixture: the mixture.
        generations: of each dataset, in the same order; the newest where there are none.

    Raises:
        DatasetError: one is no finished dataset, or stands in the mixture twice, without conditions
            that tell its documents apart, or two are generations of one dataset.
        ForeignTokenizerError: one was made with other tokenizers than the first.
        WhereError: a condition can't be understood; it lists the columns that there are.

    Example:
        >>> open_datasets(read_mixture("mixture.toml"))[0].location  # doctest: +SKIP
        '/data/aligned/web'
    """
    datasets = tuple(
        open_dataset(entry.path, generation=generation)
        for entry, generation in zip_longest(mixture.datasets, generations)
    )
    for (first, dataset), (entry, other) in combinations(
        zip(mixture.datasets, datasets, strict=True), 2
    ):
        same = dataset.manifest.fingerprint == other.manifest.fingerprint
        if same and not (first.where and entry.where):
            raise DatasetError(
                f'{mixture.path}: "{first.name}" and "{entry.name}" are one dataset (fingerprint '
                f"{dataset.manifest.fingerprint[:16]}…), whose documents would be read twice: "
                'leave one out, or give both a "where" that no document is true of in both'
            )
        if not same:
            _require_no_shared_shard(mixture, (first, dataset), (entry, other))
    for entry, dataset in zip(mixture.datasets, datasets, strict=True):
        _require_tokenizers(mixture, entry.name, dataset, datasets[0])
        select_of(mixture, entry, dataset)
    return datasets


def select_of(mixture: Mixture, entry: MixedDataset, dataset: Dataset) -> ChosenDocuments:
    """Return which of a dataset's documents a mixture reads.

    Raises:
        WhereError: its condition can't be understood; it lists the columns that there are.
    """
    try:
        return select_documents(dataset, entry.where)
    except WhereError as error:
        raise WhereError(f'{mixture.path}: "{entry.name}": {error}') from error


def require_no_overlap(
    mixture: Mixture, datasets: Sequence[Dataset], documents: Sequence[NDArray[np.uint32]]
) -> None:
    """Check that no document is read by two entries of a mixture, which are parts of one dataset.

    Args:
        mixture: for messages.
        datasets: of the mixture.
        documents: uint32 [G] of each, the documents in its rows, some of them more than once.

    Raises:
        DatasetError: one is.
    """
    entries = zip(mixture.datasets, datasets, documents, strict=True)
    for (first, dataset, own), (second, other, others) in combinations(entries, 2):
        if dataset.manifest.fingerprint != other.manifest.fingerprint:
            continue
        is_read = np.zeros(sum(shard.num_documents for shard in dataset.manifest.shards), np.bool_)
        is_read[own] = True
        num_twice = len(np.unique(others[is_read[others]]))
        if num_twice:
            raise DatasetError(
                f'{mixture.path}: "{first.name}" (where {first.where}) and "{second.name}" (where '
                f"{second.where}) are parts of one dataset and share {num_twice} documents, which "
                "would be read twice: make the conditions exclude each other"
            )


def open_any(path: str) -> Dataset:
    """Return a dataset, or one that can stand for all of a mixture.

    Its tokenizers are those of all; of the teacher's tokens it has the most by the student's, so
    that `suggest_teacher_seq_length` gives the mixture's.

    Raises:
        ValueError: see `open_datasets`.
    """
    if not is_mixture(path):
        return open_dataset(path)
    datasets = open_datasets(read_mixture(path))
    return max(datasets, key=lambda dataset: teacher_share(dataset.manifest))


def mixture_rules(
    mixture: Mixture,
    datasets: Sequence[Dataset],
    *,
    seq_length: int,
    teacher_seq_length: int | None = None,
    student: Convention | None = None,
    teacher: Convention | None = None,
    student_bos: str | None = None,
    student_eos: str | None = None,
    teacher_context: str | None = None,
    window_rows: int = 1024,
) -> PackingRules:
    """Return the one set of rules by which all of a mixture's datasets are packed.

    Args:
        mixture: for messages.
        datasets: of the mixture.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row; None takes the longest that one of them needs,
            see `suggest_teacher_seq_length`.
        student: the student's convention; None takes the datasets', with the next two in place.
        teacher: the teacher's.
        student_bos: stands before a student's text, see `choose_conventions`.
        student_eos: stands after a document's last student token, likewise.
        teacher_context: stands before a teacher's text, likewise.
        window_rows: see `PackingRules`.

    Raises:
        ValueError: datasets with other tokens around their texts than the first, no such token, or
            a length that has no room for text.
    """
    left_to_the_datasets = {
        ("student", "first_token_id"): student is None and student_bos is None,
        ("student", "continued_token_id"): student is None and student_bos is None,
        ("student", "end_token_id"): student is None and student_eos is None,
        ("teacher", "first_token_id"): teacher is None and teacher_context is None,
        ("teacher", "continued_token_id"): teacher is None and teacher_context is None,
    }
    for (side, field), is_left in left_to_the_datasets.items():
        if is_left:
            _require_one_convention(mixture, datasets, side, field)
    chosen = choose_conventions(
        datasets[0],
        student_bos=student_bos,
        student_eos=student_eos,
        teacher_context=teacher_context,
    )
    longest = max(suggest_teacher_seq_length(each.manifest, seq_length) for each in datasets)
    return PackingRules.of_dataset(
        chosen,
        seq_length=seq_length,
        teacher_seq_length=teacher_seq_length or longest,
        student=student,
        teacher=teacher,
        window_rows=window_rows,
    )


def mixture_fingerprint(mixture: Mixture, datasets: Iterable[Dataset]) -> str:
    """Return 64 hex digits: equal for mixtures that give the same rows, whatever names they use."""
    names = [entry.name for entry in mixture.datasets]
    told = {
        "seed": mixture.seed,
        # Without a condition as before there were any, so that older runs go on.
        "datasets": [
            [dataset.manifest.fingerprint, entry.max_epochs, *filter(None, [entry.where])]
            for entry, dataset in zip(mixture.datasets, datasets, strict=True)
        ],
        "stages": [
            [stage.from_tokens, [stage.weights.get(name, 0.0) for name in names]]
            for stage in mixture.stages
        ],
    }
    return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _require_no_shared_shard(
    mixture: Mixture, first: tuple[MixedDataset, Dataset], second: tuple[MixedDataset, Dataset]
) -> None:
    """Check that two datasets are no generations of one: these share shards, byte for byte."""
    (entry, dataset), (other_entry, other) = first, second
    own, others = (
        {shard.sha256: shard.file for shard in each.manifest.shards if shard.num_documents}
        for each in (dataset, other)
    )
    shared = [file for digest, file in own.items() if digest in others]
    if shared:
        raise DatasetError(
            f'{mixture.path}: "{entry.name}" and "{other_entry.name}" share {len(shared)} shards, '
            f"such as {shared[0]}, as generations of one dataset do, whose documents would be read "
            'twice: leave one out, or name the newest in both, each with a "where" that no '
            "document is true of in both"
        )


def _require_tokenizers(mixture: Mixture, name: str, dataset: Dataset, first: Dataset) -> None:
    for side in ("student", "teacher"):
        own, other = getattr(dataset.manifest, side), getattr(first.manifest, side)
        if own.sha256 != other.sha256:
            raise ForeignTokenizerError(
                f'{mixture.path}: "{name}" was made with {side} tokenizer {own.source} '
                f'({own.sha256[:16]}…), "{mixture.datasets[0].name}" with {other.source} '
                f"({other.sha256[:16]}…): align both with the same tokenizers"
            )


def _require_one_convention(
    mixture: Mixture, datasets: Sequence[Dataset], side: str, field: str
) -> None:
    """Check that all datasets have the same token at one place around their texts."""
    tokens = [getattr(getattr(each.manifest, side).around_text, field) for each in datasets]
    for entry, token in zip(mixture.datasets, tokens, strict=True):
        if token != tokens[0]:
            raise DatasetError(
                f'{mixture.path}: the {side}\'s {field} is {token} in "{entry.name}" and '
                f'{tokens[0]} in "{mixture.datasets[0].name}": name the tokens that shall stand '
                "around all texts, or align both with the same ones"
            )
