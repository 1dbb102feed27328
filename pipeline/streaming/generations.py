"""Which generation of a dataset a run reads: its own, whatever the dataset has become since."""

import logging
from typing import Literal

from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.reading import find_generation
from pipeline.streaming.state import StreamMismatchError, StreamState

Generation = int | Literal["latest"] | None

LATEST: Literal["latest"] = "latest"
"""The newest generation, also for a run that was started on another."""

logger = logging.getLogger(__name__)


def parse_generation(text: str) -> Generation:
    """Return a generation as an option names it.

    Raises:
        ValueError: neither a number nor "latest"; "" is None.

    Example:
        >>> parse_generation("3"), parse_generation("latest"), parse_generation("")
        (3, 'latest', None)
    """
    if text == LATEST:
        return LATEST
    if text and not text.isdecimal():
        raise ValueError(f'generation "{text}" is neither a number nor "{LATEST}"')
    return int(text) if text else None


def open_generation(path: str, generation: Generation, saved: StreamState | None) -> Dataset:
    """Return a dataset as a run reads it.

    Args:
        path: of the dataset.
        generation: its number; None: the one that `saved` was started on, the newest of a new run.
        saved: the state of a run that goes on; None of a new one.

    Raises:
        DatasetError: no finished dataset, or no such generation.

    Example:
        >>> open_generation("aligned", None, saved).manifest.generation  # doctest: +SKIP
        0
    """
    if isinstance(generation, int):
        return open_dataset(path, generation=generation)
    before = _open_as_saved(path, saved) if saved and generation != LATEST else None
    if before is None:
        return open_dataset(path)  # `restore` says what differs, if anything does
    newest = open_dataset(path).manifest.generation
    if newest != before.manifest.generation:
        logger.warning(
            "%s is at generation %d now; the run goes on with generation %d, on which it was "
            "started (generation latest moves it on)",
            path,
            newest,
            before.manifest.generation,
        )
    return before


def moves_on(dataset: Dataset, saved: StreamState, *, may_move: bool) -> bool:
    """Return whether a run leaves the generation that its state is of for the one that is open.

    Args:
        dataset: as the run has opened it.
        saved: the run's state.
        may_move: whether it was told to.

    Raises:
        StreamMismatchError: the state is of another generation, and the run may not move. Nothing
            is said of other datasets, whose fingerprints `StreamState.require_same_run` compares.
    """
    now = dataset.manifest
    if saved.fingerprint == now.fingerprint:
        return False
    before = _open_as_saved(dataset.location, saved)
    if before is None:
        return False
    if not may_move:
        raise StreamMismatchError(
            f"the checkpoint was made with generation {before.manifest.generation} of "
            f"{dataset.location}, and generation {now.generation} is open: hand the saved state to "
            f'open_rows, which finds its own, or give generation="{LATEST}" to move the run on'
        )
    logger.warning(
        "the run moves on to generation %d of %s: from here on its rows are another run's, so that "
        "this epoch reads some documents again and others not",
        now.generation,
        dataset.location,
    )
    return True


def _open_as_saved(path: str, saved: StreamState) -> Dataset | None:
    """Return a dataset as it was when a state was saved, None where it never was as that says."""
    newest = open_dataset(path).manifest
    if len(saved.generations) == 1:
        number: int | None = saved.generations[0]
    else:  # saved by a release that noted the fingerprint only
        number = find_generation(newest, saved.fingerprint)
    if number is None or number > newest.generation:
        return None
    dataset = open_dataset(path, generation=number)
    return dataset if dataset.manifest.fingerprint == saved.fingerprint else None
