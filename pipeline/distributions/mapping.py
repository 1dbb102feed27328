"""A teacher's distributions over its own tokens, as distributions over a student's next tokens.

A label starts at a byte of the text. If a teacher token starts there, too (a *boundary*), each
token that the teacher expects gives its mass to the student token that its bytes begin with. The
text "abcd", student tokens "ab" "cd", teacher tokens "a" "bc" "d": the label "ab" is at a boundary.
A teacher that expects "a" 0.6, "abc" 0.3 and "b" 0.1 there gives, to a student with "a", "ab", "b"
and "cd": "a" 0.6, "ab" 0.3, "b" 0.1.

The text's own next token, here "a", is the exception: of its mass the label gets what the teacher's
tokens behind it leave, up to the label's end. If "bc" has a loss of 0.5 nats, "ab" gets
0.6 exp(-0.5) = 0.36 of it: "ab" 0.66, "a" 0.24, "b" 0.1. By bytes alone a teacher that is certain
of the text would contradict it. Where the label ends inside a teacher token it is a lower bound.

"cd" starts inside the teacher's "bc", which its "b" comes before. What the teacher expects after
"a" is known; of that, tokens that continue from "b" (here "bc" and "bcd") give their mass to the
student tokens that the rest of their bytes ("c", "cd") begins with, renormalised. "b" itself says
nothing of what follows it. `kernels.LEAST_EXTENDING` and `MOST_ENDING` say when that is enough.

What isn't stored, and what has no bytes or none that the student's tokens could spell, stays as one
residual: 1 less the sum. Inside a teacher token the sum is 1: of the tokens that aren't stored, few
begin with given bytes. Where bytes aren't known, or the two tokenizers rewrite a text in different
ways, there is no distribution.

Draws stand for an equal share each of what a position's known tokens leave over. Of a position K
entries are known, the text's own next token by its loss, and n tokens s_j that were drawn from all
others. p̂ = sum_k p_k e_k + (p₀ / n) sum_j e_(s_j), with p₀ the mass of those others, is the
teacher's distribution on average, and so is what a linear map makes of it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled
from pipeline.distributions.kernels import FREE, Entries, LabelEntries, RowFields, map_places
from pipeline.distributions.vocabulary_map import VocabularyMap


def map_row(
    row: RowFields,
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    vocabulary_map: VocabularyMap,
    out: LabelEntries,
    *,
    draws: int = 0,
) -> None:
    """Write the distribution of each label of a row to `out`.

    The teacher expects `ids`, int32 [T, K], -1 behind the last, after its token at each place, with
    `log_probs`, float32 [T, K], nats. `out` gets distinct student ids by falling mass for the label
    at each place, -1 behind the last, and -1 alone if there is no distribution; their mass is at
    most 1 in all. The last `draws` of the K are draws, written to the same columns.
    """
    expected = Entries(ids, np.exp(log_probs), draws)
    if draws:
        give_masses(row, expected)
    tables, edges = vocabulary_map.tables, vocabulary_map.edges
    # Made anew: a map is shared by threads, and a row costs fifty times as much.
    scratch = np.full(len(tables.student_starts) - 1, FREE, np.uint8)
    map_places(row, expected, tables, edges, scratch, out)


def map_batch(
    rows: Mapping[str, Any],
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    vocabulary_map: VocabularyMap,
    teacher_losses: NDArray[np.float32],
    *,
    draws: int = 0,
) -> LabelEntries:
    """Return the distributions of a batch's labels, [B, S, K] and [B, S], for a teacher that runs.

    As `map_row`, of a batch of B rows in this machine's memory: ids and log-probabilities are
    [B, T, K], the same teacher's losses float32 [B, T], nats, NaN where there is none.
    """
    rows = {**rows, "teacher_losses": teacher_losses}
    fields = RowFields(*(np.asarray(rows[name]) for name in RowFields._fields))
    places = fields.input_ids.shape
    shape = (*places, ids.shape[-1])
    out = LabelEntries(
        np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(places, np.float32)
    )
    for number in range(len(ids)):
        row = RowFields(*(each[number] for each in fields))
        own = LabelEntries(*(each[number] for each in out))
        map_row(row, ids[number], log_probs[number], vocabulary_map, own, draws=draws)
    return out


@compiled
def give_masses(row: RowFields, expected: Entries) -> None:
    """Write the text's own next token behind each place's entries, and the draws' probabilities.

    Expected are at most K entries after the teacher's token at each place, -1 behind them, and the
    draws in the last columns, with one column between them. The own token is written there if it
    isn't among the entries. Only entries' probabilities are read.
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
