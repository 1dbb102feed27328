"""Plans keep their bytes: a run's rows are named by the dataset and the rules, not by the code."""

from hashlib import sha256
from itertools import starmap

import numpy as np
import pytest

from pipeline.packing.plan import plan_rows
from pipeline.packing.rules import PackingRules
from schemas.index import CUT_STRIDE
from tests.support.streaming_data import around, index_of

NUM_DOCUMENTS = (700, 1, 0, 333)
ARRAYS = ("segments", "row_starts", "window_row_starts", "window_shards", "shard_document_starts")
BOS_EOS, CONTEXT, NOTHING = around(1, 1, 2), around(3, 3, None), around()


def words(count, seed):
    """Return uint64 [count], the same for ever: SplitMix64."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def simulate_index(num_documents, seed):
    """Return documents of 0 to 4,000 tokens, most of them short; some share few boundaries."""
    student = (words(num_documents, seed) % 4001 >> words(num_documents, seed + 1) % 7).astype(int)
    teacher = student * 3 // 4 + (words(num_documents, seed + 2) % 40).astype(int)
    stride = np.where(words(num_documents, seed + 3) % 11 == 0, 900, CUT_STRIDE)
    cuts = [
        [(place, place * 3 // 4) for place in range(step, length, step)]
        for length, step in zip(student.tolist(), stride.tolist(), strict=True)
    ]
    return index_of(student, teacher, cuts)


def simulate_shards(*, chosen):
    """Yield indices, and which of their documents are wanted: about two of three, or all."""
    for number, count in enumerate(NUM_DOCUMENTS):
        index = simulate_index(count, 1000 * number)
        yield index, (words(count, number) % 3 > 0 if chosen else None)


def digest(plan):
    hashed = sha256()
    for name in ARRAYS:
        array = getattr(plan, name)
        hashed.update(f"{name} {array.dtype.descr} {array.shape}".encode() + array.tobytes())
    return hashed.hexdigest()[:16]


@pytest.mark.parametrize(
    ("rules", "chosen", "expected"),
    [
        (PackingRules(2048, 1792, BOS_EOS, CONTEXT), False, "1dfd4e0781fee2e5"),
        (PackingRules(2048, 1792, BOS_EOS, CONTEXT), True, "b98cc380b00864d1"),
        (PackingRules(512, 384, BOS_EOS, CONTEXT, window_rows=16), False, "eb94d9491751dd0a"),
        (PackingRules(512, 512, NOTHING, BOS_EOS, window_rows=100), False, "c8ef81e70413ea60"),
        (PackingRules(600, 300, NOTHING, NOTHING, window_rows=3), True, "41becf44895440f8"),
        (PackingRules(64, 64, BOS_EOS, NOTHING, window_rows=1024), False, "183862f8e0282a45"),
    ],
)
def test_a_plan_has_the_bytes_that_it_always_had(rules, chosen, expected):
    plan = plan_rows(lambda split: starmap(split, simulate_shards(chosen=chosen)), rules)
    assert digest(plan) == expected
