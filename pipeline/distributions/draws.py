"""What draws stand for: an equal share each of what a position's known tokens leave over.

Of a position K entries are known, the text's own next token by its loss, and n tokens s_j that were
drawn from all others. p̂ = sum_k p_k e_k + (p₀ / n) sum_j e_(s_j), with p₀ the mass of those others,
is the teacher's distribution on average, and so is what a linear map makes of it.
"""

import numpy as np

from pipeline.compiled import compiled
from pipeline.distributions.kernels import Entries, RowFields


@compiled
def give_masses(row: RowFields, expected: Entries) -> None:
    """Write the text's own next token behind each place's entries, and the draws' probabilities.

    Args:
        row: fields of a row.
        expected: after the teacher's token at each place at most K entries, -1 behind them, and
            the draws in the last columns; there is one column between them. The own token is
            written if it isn't among the entries. Only entries' probabilities are read.
    """
    ids, probs, draws = expected
    losses, bounds = row.teacher_losses, row.teacher_cu_seqlens
    first = ids.shape[1] - draws
    for segment in range(len(bounds) - 1):
        for place in range(bounds[segment], bounds[segment + 1]):
            if ids[place, 0] < 0:
                continue
            own, count, rest = np.int32(-1), 0, 1.0
            if place + 1 < bounds[segment + 1] and losses[place + 1] >= 0:
                own = row.teacher_input_ids[place + 1]
            while count < first - 1 and ids[place, count] >= 0:
                rest -= probs[place, count]
                if ids[place, count] == own:
                    own = np.int32(-1)
                count += 1
            if own >= 0:
                ids[place, count], probs[place, count] = own, np.exp(-losses[place + 1])
                rest -= probs[place, count]
            for draw in range(first, ids.shape[1]):
                # Rounded entries may hold more than all.
                probs[place, draw] = max(rest, 0.0) / draws
