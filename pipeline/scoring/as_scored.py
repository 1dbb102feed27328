"""A dataset as it was when a teacher scored it: through which view, and how far it had grown."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product

from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.reading import find_generation, read_generation
from pipeline.scoring.stored_losses import ScoreFiles
from schemas.errors import DatasetError


def through_view(scores: ScoreFiles, dataset: Dataset) -> Dataset:
    """Return the dataset through the view that it was scored through.

    Raises:
        DatasetError: it has that view no more.

    Example:
        >>> through_view(scores, open_dataset("aligned")).view is None  # doctest: +SKIP
        True
    """
    wanted = scores.manifest.rule.view
    if wanted is None:
        return dataset
    names = [view.name for view in dataset.manifest.views if view.identity == wanted]
    for name, number in product(names, reversed(range(dataset.manifest.generation + 1))):
        with suppress(DatasetError):  # a generation that the view was not completed for
            seen = open_dataset(dataset.location, generation=number, view=name)
            if seen.has_generation(scores.manifest.dataset):
                return seen
    raise DatasetError(
        f"{scores.path} was made through view {wanted[:16]}…, which the dataset has not, or no "
        "more: run beam_jobs.score again with its --view"
    )


def scored_generation(scores: ScoreFiles, dataset: Dataset) -> Dataset:
    """Return the dataset as it was when it was scored, where it has grown since.

    Raises:
        DatasetError: that generation's manifest is gone or another.

    Example:
        >>> scored_generation(scores, dataset).manifest.generation  # doctest: +SKIP
        0
    """
    number = find_generation(dataset.manifest, scores.manifest.dataset)
    if number is None:
        return dataset
    return replace(dataset, manifest=read_generation(dataset.location, dataset.manifest, number))
