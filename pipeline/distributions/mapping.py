"""Map a teacher's distributions over its tokens to distributions over a student's next tokens.

docs/concepts/distributions.md has the rules. In the text "abcd", student tokens "ab" "cd", teacher
tokens "a" "bc" "d", the label "ab" is at a *boundary*: a teacher token starts there, too. Each
token that the teacher expects gives its mass to the longest student token that its bytes begin
with.

"cd" starts inside the teacher's "bc". Of the expectation after "a", tokens that continue "b" ("bc",
"bcd") give their mass, renormalised, to student tokens by the rest of their bytes ("c", "cd").

A label's *own token* is that of the rest of the text's own teacher token, here "a" and "c". If it
isn't in the label's cell, the label learns no distribution. `LabelDistributions.in_cells` moves
what the token before the label rules out.

Other mass is a residual, 1 minus the sum, but inside a teacher token the sum is 1. n draws s_j
share p₀, what the known entries p_k leave over, so p̂ = sum_k p_k e_k + (p₀ / n) sum_j e_(s_j) is
the teacher's distribution on average, and so is every linear map of it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled
from pipeline.distributions.kernels import FREE, Entries, LabelEntries, map_labels
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.distributions.walk import RowFields, find_starts


def map_row(
    row: RowFields,
    expected: Entries,
    vocabulary_map: VocabularyMap,
    out: LabelEntries,
) -> None:
    """Write the distribution of each label of a row to `out`.

    `expected` follows the teacher's tokens; the last exact column, free for the text's own token,
    and draws' probabilities are filled in. `out` gets distinct student ids by falling mass, -1
    after the last, and draws in the same columns; masses add up to at most 1.
    """
    give_masses(row, expected)
    tables, edges = vocabulary_map.tables, vocabulary_map.edges
    # Not kept: threads share a map, and a row costs fifty times as much.
    scratch = np.full(len(tables.student_starts) - 1, FREE)
    starts = find_starts(row, tables, edges)
    map_labels(row.teacher_input_ids, starts, expected, tables, edges, scratch, out)


def map_batch(
    rows: Mapping[str, Any],
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    vocabulary_map: VocabularyMap,
    teacher_losses: NDArray[np.float32],
    *,
    exact: int,
) -> LabelEntries:
    """Return a running teacher's distributions of a batch's labels, [B, S, K] and [B, S].

    After its tokens the teacher expects `ids`, int32 [B, T, K], -1 after the last, with
    `log_probs`, float32 [B, T, K], nats; the last of the first `exact` columns is free, later ones
    are draws. `teacher_losses` are float32 [B, T], nats, NaN if undefined.
    """
    rows = {**rows, "teacher_losses": teacher_losses}
    fields = RowFields(*(np.asarray(rows[name]) for name in RowFields._fields))
    out = empty_entries(*fields.input_ids.shape, ids.shape[-1])
    for number in range(len(ids)):
        row = RowFields(*(each[number] for each in fields))
        own = LabelEntries(*(each[number] for each in out))
        expected = Entries(ids[number].copy(), np.exp(log_probs[number]), exact)
        map_row(row, expected, vocabulary_map, own)
    return out


def empty_entries(*shape: int) -> LabelEntries:
    """Return uninitialised entries, [..., S, K]."""
    ids, probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    return LabelEntries(ids, probs, np.empty(shape[:-1], np.int32))


@compiled
def give_masses(row: RowFields, expected: Entries) -> None:
    """Add the text's own next token, unless it is an entry, and fill in draws' masses."""
    ids, probs, exact = expected
    losses, bounds = row.teacher_losses, row.teacher_cu_seqlens
    for segment in range(len(bounds) - 1):
        for place in range(bounds[segment], bounds[segment + 1]):
            if ids[place, 0] < 0:
                continue
            own, count, rest = np.int32(-1), 0, 1.0
            if place + 1 < bounds[segment + 1] and losses[place + 1] >= 0:
                own = row.teacher_input_ids[place + 1]
            while count < exact - 1 and ids[place, count] >= 0:
                rest -= probs[place, count]
                if ids[place, count] == own:
                    own = np.int32(-1)
                count += 1
            if own >= 0:
                ids[place, count], probs[place, count] = own, np.exp(-losses[place + 1])
                rest -= probs[place, count]
            for draw in range(exact, ids.shape[1]):
                # Rounded entries may hold more than all.
                probs[place, draw] = max(rest, 0.0) / (ids.shape[1] - exact)
