"""How often the host waits for its device, and the largest tensor there, without a device."""

import re
from collections import Counter

import pytest

pytest.importorskip("megatron.core")

from tests.megatron_plugin.training_job import GLOBAL_BATCH, MICRO_BATCH, SEQ_LENGTH, train

pytestmark = pytest.mark.slow

VOCAB_SIZE = 400  # of the student, the smaller one
MICRO_BATCHES = GLOBAL_BATCH // MICRO_BATCH


def waits(inputs, num_ranks, **changes):
    """Return how often our own lines wait in the second step, by what was called."""
    environment = {"VOCAG_TEST_WAITS": "1"}
    done = train(inputs, num_ranks, train_iters=2, environment=environment, **changes)
    found = re.findall(r"^(\w+) waits (\d+) at (\w+) (.*)$", done.stdout, re.M)
    print(*found, sep="\n")
    held = [int(size) for size in re.findall(r"^\w+ holds (\d+)$", done.stdout, re.M)]
    assert max(held) < MICRO_BATCH * SEQ_LENGTH * VOCAB_SIZE, "whole logits"
    counts = Counter()
    for called, count, whose, _ in found:
        counts[called, whose] += int(count)
    assert counts["train_step", "Megatron"], "nothing was looked at"
    return counts["train_step", "ours"], counts["score", "ours"]


def test_a_step_waits_twice_a_micro_batch_and_a_teacher_never(inputs):
    """Then once a step, to know whether the teacher's losses are sound."""
    assert waits(inputs, 2, vocag_teacher_world_size=1) == (2 * MICRO_BATCHES + 1, 0)


@pytest.mark.parametrize("draws", [0, 4])
def test_distributions_are_waited_for_twice_more(inputs, draws):
    """Which entries lie in which chunk of the vocabulary, forward and backward.

    A teacher, of a row a pass, looks in each of four chunks, and twice for equal logits; to draw,
    six times for the blocks that hold what may not be drawn, and that are drawn.
    """
    distill = {"vocag_teacher_world_size": 1, "vocag_method": "distill", "vocag_top_k": 4}
    own = 4 + 2 + (6 if draws else 0)
    found = waits(inputs, 2, **distill, vocag_draws=draws)
    assert found == (4 * MICRO_BATCHES + 1, own * GLOBAL_BATCH)


def test_without_a_teacher_there_is_nothing_more_to_wait_for(inputs):
    student = {"vocag_teacher": None, "vocag_method": "student_loss", "vocag_unmapped": "mean"}
    assert waits(inputs, 1, **student) == (2 * MICRO_BATCHES, 0)
