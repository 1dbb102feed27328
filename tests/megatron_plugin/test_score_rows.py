"""Pieces in a teacher's rows: each token's loss has one place, behind its own context."""

from itertools import pairwise

import numpy as np
import pytest

from megatron_plugin.teacher.score_rows import pack_pieces, place_losses
from pipeline.packing.rules import Convention, PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.sidecars import DocumentTokens
from tests.support.streaming_data import make_documents, make_index

SEQ, BOS = 48, 7


@pytest.fixture(scope="module")
def index():
    documents = make_documents([40, 1, 300, 41, 39, 7, 100, 12], seed=2)
    return make_index(documents, [0] * 8, [b""] * 8)


def rows_rule(teacher):
    return ContextRule.of_rows(PackingRules(40, SEQ, Convention(1, 1, 2), teacher))


RULES = [
    rows_rule(Convention(BOS, BOS)),
    rows_rule(Convention()),
    rows_rule(Convention(BOS, None)),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_rows", [1, 4])
def test_each_token_has_one_place_after_its_context(index, rule, num_rows):
    starts = np.concatenate([[0], np.cumsum(index.num_teacher_tokens)])
    tokens = DocumentTokens(np.arange(100, 100 + starts[-1]), starts)
    pieces = rule.pieces(index)
    packed = pack_pieces(tokens, pieces, rule, num_rows=num_rows)
    assert packed.input_ids.shape == packed.targets.shape
    assert packed.input_ids.shape[0] % num_rows == 0
    assert packed.input_ids.shape[1] == SEQ
    taken = packed.targets >= 0
    np.testing.assert_array_equal(packed.input_ids[taken], tokens.input_ids[packed.targets[taken]])
    found = []
    for line, bounds in zip(packed.input_ids, packed.cu_seqlens, strict=True):
        assert bounds[0] == 0
        assert bounds[-1] == SEQ
        segments = [line[a:b].tolist() for a, b in pairwise(bounds) if b > a]
        found += [segment for segment in segments if any(segment)]
    expected, scored = [], set(range(starts[-1]))
    for n in range(len(pieces)):
        context = rule.context_token(continues=bool(pieces.continues[n]))
        first = starts[pieces.document[n]] + 100
        text = range(first + pieces.start[n], first + pieces.stop[n])
        if context is None:
            scored.remove(text[0] - 100)  # nothing stands before it
        expected.append(([] if context is None else [context]) + list(text))
    assert sorted(found) == sorted(expected)
    assert sorted(packed.targets[taken]) == sorted(scored)


def test_losses_go_where_their_tokens_stand(index):
    rule = RULES[0]
    starts = np.concatenate([[0], np.cumsum(index.num_teacher_tokens)])
    tokens = DocumentTokens(np.arange(starts[-1]), starts)
    packed = pack_pieces(tokens, rule.pieces(index), rule)
    losses = np.where(packed.targets >= 0, packed.targets, np.nan).astype(np.float32)
    placed = place_losses(losses, packed, num_tokens=len(tokens.input_ids))
    np.testing.assert_array_equal(placed, np.arange(starts[-1]))
    losses[packed.targets == 5] = np.inf
    with pytest.raises(ValueError, match="gave 1 infinite losses"):
        place_losses(losses, packed, num_tokens=len(tokens.input_ids))


def test_a_shard_without_tokens_makes_empty_rows():
    empty = make_index([], [], [])
    tokens = DocumentTokens(np.empty(0, np.int64), np.zeros(1, np.int64))
    packed = pack_pieces(tokens, RULES[0].pieces(empty), RULES[0], num_rows=2)
    assert packed.input_ids.shape == (2, SEQ)
    assert packed.cu_seqlens.tolist() == [[0, SEQ]] * 2
    assert (packed.targets == -1).all()
