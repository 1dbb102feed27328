"""A teacher's distributions over its own tokens, as distributions over a student's next tokens.

A label starts at a byte of the text. If a teacher token starts there, too (a *boundary*), each
token that the teacher expects gives its mass to the student token that its bytes begin with. The
text "abcd", student tokens "ab" "cd", teacher tokens "a" "bc" "d": the label "ab" is at a boundary.
A teacher that expects "a" 0.6, "abc" 0.3 and "b" 0.1 there gives, to a student with "a", "ab", "b"
and "cd": "a" 0.6, "ab" 0.3, "b" 0.1.

"cd" starts inside the teacher's "bc", which its "b" comes before. What the teacher expects after
"a" is known; of that, tokens that continue from "b" (here "bc" and "bcd") give their mass to the
student tokens that the rest of their bytes ("c", "cd") begins with, renormalised. "b" itself says
nothing of what follows it. `kernels.LEAST_EXTENDING` and `MOST_ENDING` say when that is enough.

What isn't stored, and what has no bytes or none that the student's tokens could spell, stays as one
residual: 1 less the sum. Inside a teacher token the sum is 1: of the tokens that aren't stored, few
begin with given bytes. Where bytes aren't known, or the two tokenizers rewrite a text in different
ways, there is no distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.distributions.draws import give_masses
from pipeline.distributions.kernels import FREE, Entries, RowFields, map_places
from pipeline.distributions.vocabulary_map import VocabularyMap


def map_row(
    row: Mapping[str, Any],
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    vocabulary_map: VocabularyMap,
    next_token_ids: NDArray[np.int32],
    next_token_probs: NDArray[np.float32],
    *,
    draws: int = 0,
    losses: NDArray[np.float32] | None = None,
) -> None:
    """Write the distribution of each label of a row.

    Args:
        row: fields of a row, as `pipeline.streaming.Rows` names them; tensors or arrays.
        ids: int32 [T, K], the teacher's ids that it expects after its token at each place of the
            row, -1 behind the last.
        log_probs: float32 [T, K], nats, theirs.
        vocabulary_map: of the row's tokenizers.
        next_token_ids: int32 [S, K], written: distinct student ids by falling mass for the label at
            each place, -1 behind the last; -1 alone if there is no distribution.
        next_token_probs: float32 [S, K], written: their mass; at most 1 in all.
        draws: how many of the K, the last, are draws (`pipeline.distributions.draws`): written
            into the same columns, -1 where there is none.
        losses: float32 [T], nats, of the row's teacher tokens, NaN where there is none; for draws.
    """
    fields = RowFields(*(np.asarray(row[name]) for name in RowFields._fields))
    expected = Entries(ids, np.exp(log_probs), draws)
    if losses is not None and draws:
        give_masses(fields, losses, expected)
    out = Entries(next_token_ids, next_token_probs, draws)
    tables, edges = vocabulary_map.tables, vocabulary_map.edges
    # Made anew: a map is shared by threads, and a row costs fifty times as much.
    scratch = np.full(len(tables.student_starts) - 1, FREE, np.uint8)
    map_places(fields, expected, tables, edges, scratch, out)


def map_batch(
    rows: Mapping[str, Any],
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    vocabulary_map: VocabularyMap,
    *,
    losses: NDArray[np.float32] | None = None,
    draws: int = 0,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the distributions of a batch's labels, for a teacher that runs with the student.

    Args:
        rows: a batch of B rows in this machine's memory.
        ids: int32 [B, T, K], as in `map_row`.
        log_probs: float32 [B, T, K].
        vocabulary_map: of the rows' tokenizers.
        losses: float32 [B, T], as in `map_row`; None: draws have the log-probabilities given.
        draws: as in `map_row`.

    Returns:
        `next_token_ids` int32 [B, S, K] and `next_token_probs` float32 [B, S, K].

    Example:
        >>> next_ids, probs = map_batch(rows, ids, log_probs, vocabulary_map)  # doctest: +SKIP
    """
    fields = {name: np.asarray(rows[name]) for name in RowFields._fields}
    shape = (*fields["input_ids"].shape, ids.shape[-1])
    out = np.empty(shape, np.int32), np.empty(shape, np.float32)
    for number in range(len(ids)):
        row = {name: values[number] for name, values in fields.items()}
        given = ids[number], log_probs[number], vocabulary_map, out[0][number], out[1][number]
        own = None if losses is None else losses[number]
        map_row(row, *given, draws=draws, losses=own)
    return out
