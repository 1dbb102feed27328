"""A dataset as it was when a teacher scored it, where it has grown since."""

from __future__ import annotations

from dataclasses import replace

from pipeline.dataset.files import Dataset
from pipeline.dataset.reading import find_generation, read_generation
from pipeline.scoring.stored_losses import ScoreFiles


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
