"""Digests of what a teacher sees: equal for equal documents, and for no others."""

from dataclasses import replace

import numpy as np

from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.reusable_losses import ReusableDocuments, document_digests
from pipeline.scoring.sidecars import DocumentTokens

RULE = ContextRule(
    seq_length=40,
    teacher_seq_length=40,
    first_token_id=9,
    continued_token_id=8,
    student_added_tokens=(1, 1, 1),
)


def a_document(**changes: list[int]) -> tuple[DocumentTokens, Pieces]:
    """Return a document of five tokens in two pieces, and an empty one behind it."""
    columns = {"start": [0, 3], "stop": [3, 5], "continues": [0, 1]}
    ids = np.array(changes.pop("ids", [5, 6, 7, 5, 6]), np.int64)
    arrays = {name: np.array(values, np.int64) for name, values in (columns | changes).items()}
    arrays["continues"] = arrays["continues"].astype(np.bool_)
    pieces = Pieces(np.zeros(len(arrays["start"]), np.int64), **arrays)
    return DocumentTokens(ids, np.array([0, len(ids), len(ids)])), pieces


def digest(rule: ContextRule = RULE, **changes: list[int]) -> bytes:
    tokens, pieces = a_document(**changes)
    digests = document_digests(tokens, pieces, rule)
    assert digests.dtype == "S16"
    assert digests[0] != digests[1]
    return bytes(digests[0])


def test_whatever_the_teacher_would_see_otherwise_changes_a_digest() -> None:
    found = [
        digest(),
        digest(ids=[5, 6, 7, 5, 7]),
        digest(ids=[5, 6, 7, 5, 6, 6]),
        digest(start=[0, 2]),
        digest(stop=[2, 5]),
        digest(continues=[1, 1]),
        digest(replace(RULE, first_token_id=None)),
        digest(replace(RULE, continued_token_id=7)),
    ]
    assert len(set(found)) == len(found)
    assert digest(replace(RULE, teacher_seq_length=80, seq_length=90)) == digest()


def test_documents_are_found_by_their_whole_digest_and_of_equal_ones_the_first() -> None:
    rng = np.random.default_rng(3)
    # few different bytes: equal beginnings, and zeros at the end, which numpy's strings drop
    raw = rng.integers(0, 2, (600, 16), np.uint8)
    raw[:, :10] = 0
    digests = np.frombuffer(raw.tobytes(), "S16")
    numbers = np.arange(600, dtype=np.uint32)
    parts = [
        ReusableDocuments(digests[a:b], np.stack([numbers[a:b]] * 2, axis=1))
        for a, b in [(0, 250), (250, 500)]
    ]
    known = ReusableDocuments.merge(parts)
    expected: dict[bytes, int] = {}
    for number in range(500):
        expected.setdefault(raw[number].tobytes(), number)
    assert len(known) == len(expected) < 100
    wanted = np.frombuffer(rng.integers(0, 2, (300, 16), np.uint8).tobytes() + raw.tobytes(), "S16")
    places = known.find(wanted)
    found = [int(known.places[place, 1]) if place >= 0 else None for place in places]
    assert found == [expected.get(one.ljust(16, b"\0")) for one in wanted.tolist()]
    assert (places[:300] < 0).any()
    assert (ReusableDocuments().find(wanted) == -1).all()
