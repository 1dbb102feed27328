"""Contexts: each token in one piece, rows' pieces as rows have them, digests for differences."""

import numpy as np
import pytest

from pipeline.packing.kernels import STARTS
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule, plan_contexts
from schemas.errors import DatasetError
from tests.support.streaming_data import around, make_documents, make_index, plan_indices

LENGTHS = [5, 90, 1, 250, 33, 400, 12]


@pytest.fixture(scope="module")
def index():
    documents = make_documents(LENGTHS, seed=3)
    return make_index(documents, [0] * len(documents), [b""] * len(documents))


def packing(seq_length=64, teacher_seq_length=80, *, teacher=None):
    teacher = teacher or around(9, 8)
    return PackingRules(seq_length, teacher_seq_length, around(1, 1, 2), teacher)


RULES = [
    ContextRule.of_rows(packing()),
    ContextRule.of_rows(packing(teacher=around())),
    ContextRule.of_rows(packing(4096, 4096)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.describe())
def test_every_token_is_scored_once_and_sees_at_most_the_limit(rule, index):
    pieces = rule.pieces(index)
    seen = [np.zeros(count, int) for count in index.num_teacher_tokens]
    for document, start, stop in zip(pieces.document, pieces.start, pieces.stop, strict=True):
        assert start < stop
        seen[document][start:stop] += 1
    assert all((count == 1).all() for count in seen)
    added = [
        int(rule.context_token(continues=bool(c)) is not None) for c in pieces.continues.tolist()
    ]
    assert (pieces.stop - pieces.start + added <= rule.teacher_seq_length).all()
    assert ContextRule.from_json(rule.to_json()) == rule


def test_rows_pieces_are_the_plan_s_segments(index):
    rules = packing()
    plan, pieces = plan_indices([index], rules), ContextRule.of_rows(rules).pieces(index)
    segments = {
        (int(s["document"]), int(s["teacher_start"]), int(s["teacher_stop"]), bool(s["flags"] & 1))
        for s in plan.segments
        if s["teacher_stop"] > s["teacher_start"]
    }
    columns = (pieces.document, pieces.start, pieces.stop, ~pieces.continues)
    found = set(zip(*(column.tolist() for column in columns), strict=True))
    assert STARTS == 1
    assert found == segments
    assert pieces.num_split_documents == 3


def test_a_plan_s_contexts_are_its_rule_s_shard_by_shard(index):
    other = make_index(make_documents([300, 7], seed=8), [0, 0], [b"", b""])
    plan = plan_indices([index, other], packing())
    rule = ContextRule.of_rows(packing())
    expected = [rule.pieces(shard).context_sha256 for shard in (index, other)]
    assert plan_contexts(plan) == expected
    assert expected[0] != expected[1]


def test_digests_tell_contexts_apart_and_nothing_else(index):
    rows = ContextRule.of_rows(packing()).pieces(index).context_sha256
    assert ContextRule.of_rows(packing(40)).pieces(index).context_sha256 != rows
    # Where no document is split, lengths say nothing.
    whole = ContextRule.of_rows(packing(4096, 4096)).pieces(index)
    assert whole.num_split_documents == 0
    longer = ContextRule.of_rows(packing(8192, 8192)).pieces(index)
    assert whole.context_sha256 == longer.context_sha256


def test_impossible_rules_are_refused():
    with pytest.raises(ValueError, match="adds token 7 after a document"):
        ContextRule.of_rows(packing(teacher=around(1, 1, 7)))
    body = ContextRule.of_rows(packing()).to_json()
    for altered in ({"stride": 3}, body | {"stride": 20}, body | {"more": 1}):
        with pytest.raises(DatasetError, match="not a context rule"):
            ContextRule.from_json(altered)
