"""Contexts: each token in one piece, rows' pieces as rows have them, digests for differences."""

import numpy as np
import pytest

from pipeline.packing.plan import STARTS, plan_rows
from pipeline.packing.rules import Convention, PackingRules
from pipeline.scoring.contexts import ContextRule, plan_contexts
from schemas.errors import DatasetError
from tests.support.streaming_data import make_documents, make_index

LENGTHS = [5, 90, 1, 250, 33, 400, 12]


@pytest.fixture(scope="module")
def index():
    documents = make_documents(LENGTHS, seed=3)
    return make_index(documents, [0] * len(documents), [b""] * len(documents))


def packing(seq_length=64, teacher_seq_length=80, *, teacher=None):
    teacher = teacher or Convention(9, 8)
    return PackingRules(seq_length, teacher_seq_length, Convention(1, 1, 2), teacher)


def windows(stride, length=40, *, first=9, continued=9):
    return ContextRule(
        teacher_seq_length=length,
        first_token_id=first,
        continued_token_id=continued,
        stride=stride,
    )


RULES = [
    ContextRule.of_rows(packing()),
    ContextRule.of_rows(packing(teacher=Convention())),
    ContextRule.of_rows(packing(4096, 4096)),
    windows(20),
    windows(1, length=30, first=None),
    windows(38),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.describe())
def test_every_token_is_scored_once_and_sees_at_most_the_limit(rule, index):
    pieces = rule.pieces(index)
    seen = [np.zeros(count, int) for count in index.num_teacher_tokens]
    for row in zip(pieces.document, pieces.start, pieces.scored_from, pieces.stop, strict=True):
        document, start, scored, stop = map(int, row)
        assert start <= scored < stop
        seen[document][scored:stop] += 1
    assert all((count == 1).all() for count in seen)
    added = [
        int(rule.context_token(continues=bool(c)) is not None) for c in pieces.continues.tolist()
    ]
    assert (pieces.stop - pieces.start + added <= rule.teacher_seq_length).all()
    assert ContextRule.from_json(rule.to_json()) == rule


def test_rows_pieces_are_the_plan_s_segments(index):
    rules = packing()
    plan, pieces = plan_rows([index], rules), ContextRule.of_rows(rules).pieces(index)
    segments = {
        (int(s["document"]), int(s["teacher_start"]), int(s["teacher_stop"]), bool(s["flags"] & 1))
        for s in plan.segments
        if s["teacher_stop"] > s["teacher_start"]
    }
    found = set(
        zip(
            pieces.document.tolist(),
            pieces.start.tolist(),
            pieces.stop.tolist(),
            (~pieces.continues).tolist(),
            strict=True,
        )
    )
    assert STARTS == 1
    assert found == segments
    assert pieces.num_split_documents == 3


def test_windows_of_the_docstring(index):
    documents = make_documents([4], seed=0)
    one = make_index(documents, [0], [b""])
    one.num_teacher_tokens[0] = 10
    pieces = windows(3, length=4, first=None, continued=None).pieces(one)
    assert pieces.start.tolist() == [0, 3, 6]
    assert pieces.scored_from.tolist() == [0, 4, 7]
    assert pieces.stop.tolist() == [4, 7, 10]


def test_a_plan_s_contexts_are_its_rule_s_shard_by_shard(index):
    other = make_index(make_documents([300, 7], seed=8), [0, 0], [b"", b""])
    plan = plan_rows([index, other], packing())
    rule = ContextRule.of_rows(packing())
    expected = [rule.pieces(shard).context_sha256 for shard in (index, other)]
    assert plan_contexts(plan) == expected
    assert expected[0] != expected[1]


def test_digests_tell_contexts_apart_and_nothing_else(index):
    rows = ContextRule.of_rows(packing()).pieces(index).context_sha256
    assert ContextRule.of_rows(packing(40)).pieces(index).context_sha256 != rows
    assert windows(30).pieces(index).context_sha256 != windows(29).pieces(index).context_sha256
    # Where no document is split, lengths say nothing.
    whole = ContextRule.of_rows(packing(4096, 4096)).pieces(index)
    assert whole.num_split_documents == 0
    assert whole.context_sha256 == windows(9, length=900).pieces(index).context_sha256


def test_impossible_rules_are_refused():
    with pytest.raises(ValueError, match=r"stride 39 is not in 1 … 38: windows of 40 tokens must"):
        windows(39)
    with pytest.raises(ValueError, match="either seq_length"):
        ContextRule(teacher_seq_length=8, first_token_id=1, continued_token_id=1)
    with pytest.raises(ValueError, match="adds token 7 after a document"):
        ContextRule.of_rows(packing(teacher=Convention(1, 1, 7)))
    with pytest.raises(DatasetError, match="no context rule"):
        ContextRule.from_json({"stride": 3})
