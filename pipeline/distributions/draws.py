"""What draws stand for: an equal share each of what a position's known tokens leave over.

Of a position K entries are known, the text's own next token by its loss, and n tokens s_j that were
drawn from all others. p̂ = sum_k p_k e_k + (p₀ / n) sum_j e_(s_j), with p₀ the mass of those others,
is the teacher's distribution on average, and so is what a linear map makes of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled
from pipeline.distributions.kernels import RowFields


def give_masses(
    row: RowFields,
    losses: NDArray[np.float32],
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    draws: int,
) -> None:
    """Write the text's own next token behind each place's entries, and the draws' probabilities.

    Args:
        row: fields of a row.
        losses: float32 [T], nats, of the row's teacher tokens; NaN if there is none.
        ids: int32 [T, K + 1 + draws], what is expected after the teacher's token at each place: at
            most K entries, -1 behind them, and the draws in the last columns. The own token is
            written if it isn't among the entries.
        log_probs: float32 [T, K + 1 + draws], nats, of the entries; the others' are written.
        draws: how many columns are draws, 1 or more.

    Example:
        >>> give_masses(fields, row["teacher_losses"], ids, log_probs, 4)  # doctest: +SKIP
    """
    _give_masses(row.teacher_input_ids, row.teacher_cu_seqlens, losses, ids, log_probs, draws)


@compiled
def _give_masses(
    teacher_ids: NDArray[np.int32],
    bounds: NDArray[np.int32],
    losses: NDArray[np.float32],
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    draws: int,
) -> None:
    first = ids.shape[1] - draws
    for segment in range(len(bounds) - 1):
        for place in range(bounds[segment], bounds[segment + 1]):
            if ids[place, 0] < 0:
                continue
            own, count, rest = -1, 0, 1.0
            if place + 1 < bounds[segment + 1] and losses[place + 1] >= 0:
                own = teacher_ids[place + 1]
            while count < first - 1 and ids[place, count] >= 0:
                rest -= np.exp(np.float64(log_probs[place, count]))
                if ids[place, count] == own:
                    own = -1
                count += 1
            if own >= 0:
                ids[place, count], log_probs[place, count] = own, -losses[place + 1]
                rest -= np.exp(-np.float64(losses[place + 1]))
            # Rounded entries may hold more than all.
            share = np.log(rest / draws) if rest > 0 else -np.inf
            log_probs[place, first:] = share
