"""Whether a run leaves the generations that it was started on for those that are open."""

import logging

from pipeline.packing.opening import OpenedRun, name_generations
from pipeline.packing.reading import LATEST
from pipeline.streaming.state import StreamMismatchError, StreamState

logger = logging.getLogger(__name__)


def moves_on(run: OpenedRun, saved: StreamState) -> bool:
    """Return whether a run leaves the generations that its state is of for those that are open.

    Args:
        run: as it was opened.
        saved: the run's state.

    Raises:
        StreamMismatchError: the state is of other generations, and the run may not move. Nothing is
            said of other data, whose fingerprints `StreamState.require_same_run` compares.
    """
    if not run.reads_more_of(saved):
        return False
    path, now = run.mixture.path, name_generations(run.generations)
    if run.reading.generation != LATEST:
        raise StreamMismatchError(
            f"the checkpoint was made with generation {name_generations(saved.generations)} of "
            f"{path}, and generation {now} is open: hand the saved state to AlignedRows, which "
            f'finds its own, or give generation="{LATEST}" to move the run on'
        )
    logger.warning(
        "the run moves on to generation %s of %s: from here on its rows are another run's, so that "
        "this epoch reads some documents again and others not",
        now,
        path,
    )
    return True
