"""One selection, however rows and tokens are shared among ranks.

Ranks are threads here; real processes choose together in
tests/pipeline/training/test_guided_student.py.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from pipeline.guidance import SelectionRule, select_tokens
from pipeline.losses.loss_checks import NonFiniteLossError
from tests.support.rank_threads import NUM_RANKS

ROWS, SEQ_LENGTH = 8, 32
SELECTORS = ("teacher", "full", "random", "student_loss", "student_entropy", "teacher_loss")
STRATEGIES = ("include", "exclude", "mean")
CASES = tuple(itertools.product(SELECTORS, STRATEGIES, (0.01, 0.4, 0.73)))
SHARINGS = {"even rows": [2, 2, 2, 2], "uneven rows": [3, 1, 0, 4]}


def make_batch():
    """Losses with few distinct values, so that thresholds fall on ties; some rows all unmapped."""
    generator = torch.Generator().manual_seed(0)
    student, guidance, entropies = (
        torch.randint(0, 6, (ROWS, SEQ_LENGTH), generator=generator) * 0.3 for _ in range(3)
    )
    guidance[torch.rand(ROWS, SEQ_LENGTH, generator=generator) < 0.2] = torch.nan
    guidance[3:5] = torch.nan
    mask = torch.rand(ROWS, SEQ_LENGTH, generator=generator) < 0.9
    # Uneven sums, so that a mean over other tokens than the whole group's would show.
    teacher = torch.rand(ROWS, SEQ_LENGTH, generator=generator) * torch.arange(ROWS)[:, None]
    teacher[torch.rand(ROWS, SEQ_LENGTH, generator=generator) < 0.3] = torch.nan
    return student, guidance, entropies, mask, teacher


def share_of(tensor, rank, sharing):
    return tensor.split(SHARINGS[sharing])[rank]


def select(batch, case, group=None):
    student, guidance, entropies, mask, teacher = batch
    selector, unmapped, fraction = case
    scope = "microbatch" if group is None else "group"
    return select_tokens(
        student,
        guidance,
        loss_mask=mask,
        rule=SelectionRule(selector, fraction, unmapped, scope, seed=5),
        group=group,
        teacher_losses=teacher,
        entropies=entropies,
        step=7,
    )


@pytest.mark.parametrize("sharing", SHARINGS)
def test_ranks_select_what_one_process_selects(run_ranks, sharing):
    batch = make_batch()

    def choose(group):
        own = [share_of(tensor, group.rank(), sharing) for tensor in batch]
        return [select(own, case, group) for case in CASES]

    for rank, found in enumerate(run_ranks(choose)):
        for case, selection in zip(CASES, found, strict=True):
            whole = select(batch, case)
            assert torch.equal(selection.kept, share_of(whole.kept, rank, sharing)), (case, rank)
            torch.testing.assert_close(
                selection.threshold, whole.threshold, rtol=0, atol=0, equal_nan=True
            )


def test_the_batch_has_ties_that_ranks_could_break_differently():
    """A microbatch for each rank chooses otherwise, so the agreement above is no accident."""
    batch, case = make_batch(), ("teacher", "include", 0.4)
    alone = [
        select([share_of(tensor, rank, "even rows") for tensor in batch], case).kept
        for rank in range(NUM_RANKS)
    ]
    assert not torch.equal(torch.cat(alone), select(batch, case).kept)


def test_a_broken_rank_stops_all_and_names_its_row(run_ranks):
    def choose(group):
        batch = [share_of(tensor, group.rank(), "even rows").clone() for tensor in make_batch()]
        if group.rank() == 2:
            batch[0][1, batch[3][1].nonzero()[0]] = torch.nan
        with pytest.raises(NonFiniteLossError) as caught:
            select(batch, CASES[0], group)
        return str(caught.value)

    for rank, error in enumerate(run_ranks(choose)):
        expected = "student_losses[1, " if rank == 2 else "student_losses or guidance or"
        assert error.startswith(expected)


def test_what_ranks_must_know_of_each_other_goes_in_one_message(run_ranks):
    """Then three histograms of losses, and how many are tied at the threshold."""

    def count(group):
        batch = [share_of(tensor, group.rank(), "even rows") for tensor in make_batch()]
        distinct = torch.arange(batch[0].numel()).view_as(batch[0]) + group.rank() / NUM_RANKS
        calls = []
        for student in (distinct, torch.ones_like(distinct)):
            for unmapped in STRATEGIES:
                before = group.num_messages
                select([student, student * 0, *batch[2:]], ("teacher", unmapped, 0.4), group)
                calls.append(group.num_messages - before)
        return calls

    assert run_ranks(count) == [[5] * 6] * NUM_RANKS


def test_a_group_needs_scope_group():
    with pytest.raises(ValueError, match="scope 'row' does not take a process group"):
        select_tokens(
            torch.ones(1, 1),
            torch.ones(1, 1),
            loss_mask=torch.ones(1, 1),
            rule=SelectionRule(scope="row"),
            group=dist.ProcessGroup(0, 1),
        )
