"""One selection and one loss, however rows, tokens and the vocabulary are shared among ranks.

Ranks are threads here; real processes choose together in
tests/pipeline/training/test_guided_student.py.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.guidance import NonFiniteLossError, SelectionRule, select_tokens
from pipeline.guidance.cells import Cells
from pipeline.guidance.cross_entropy import linear_cross_entropy
from pipeline.guidance.likeliest import score_with_likeliest
from pipeline.guidance.output_layer import OutputLayer, VocabularyShare
from pipeline.guidance.tail import TailDraws, draw_keys

NUM_RANKS = 4
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


class Group:
    """A rank's view of a process group whose ranks are threads; it counts its messages."""

    def __init__(self, rank, barrier, held):
        self.rank, self.size = lambda: rank, lambda: NUM_RANKS
        self.barrier, self.held, self.num_messages = barrier, held, 0

    def exchange(self, tensor):
        self.num_messages += 1
        self.held[self.rank()] = tensor.clone()
        self.barrier.wait()
        everyones = list(self.held)
        self.barrier.wait()
        return everyones


@pytest.fixture
def run_ranks(monkeypatch):
    """A function that gives each rank its group, at once, and returns what each rank makes."""

    def reduce(tensor, op=dist.ReduceOp.SUM, *, group):
        everyones = torch.stack(group.exchange(tensor))
        tensor.copy_(everyones.amax(0) if op == dist.ReduceOp.MAX else everyones.sum(0))

    collect = lambda into, own, group: torch._foreach_copy_(into, group.exchange(own))  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "all_gather", collect)

    def run(rank_of):
        barrier, held = Barrier(NUM_RANKS, timeout=60), [None] * NUM_RANKS
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            groups = [Group(rank, barrier, held) for rank in range(NUM_RANKS)]
            return list(pool.map(rank_of, groups))

    return run


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


# The last rank's part is cut, or nothing but padding, which must not count.
@pytest.mark.parametrize("vocab_size", [1000, 700, 4])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (2.5, 3.0)])
@pytest.mark.parametrize("num_cells", [None, 300, 2])
def test_ranks_that_share_a_vocabulary_get_the_losses_of_one_process(
    run_ranks, vocab_size, scale, cap, num_cells
):
    """The tokens of a cell may lie on several ranks, or on one that isn't the first."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 10, 8, dtype=torch.float64, generator=generator)
    weight = torch.randn(1024, 8, dtype=torch.float64, generator=generator)
    weight[vocab_size:] = 1e4
    labels = torch.randint(vocab_size, (3, 10), generator=generator)
    entries = torch.randint(-1, vocab_size, (3, 10, 5), generator=generator)
    weights = torch.rand(3, 10, 6, dtype=torch.float64, generator=generator).sub_(0.5).relu_()
    cells = None
    if num_cells is not None:
        chosen = torch.randint(num_cells, (vocab_size,), generator=generator)
        _, numbers = torch.unique(chosen, return_inverse=True)
        least = torch.full((vocab_size,), vocab_size)
        least.scatter_reduce_(0, numbers, torch.arange(vocab_size), "amin")
        cells = Cells.of(least[numbers].numpy())

    def score(own_weight, group=None):
        inputs = hidden.clone().requires_grad_(), own_weight.clone().requires_grad_()
        layer = OutputLayer(inputs[1], scale, cap)
        scores = linear_cross_entropy(
            inputs[0],
            layer,
            labels,
            vocab_size=vocab_size,
            with_entropy=True,
            entry_ids=entries,
            cells=cells,
            group=group,
        )
        found = scores.entry_log_probs.masked_fill(entries < 0, 0.0)
        every = torch.cat((scores.losses.unsqueeze(-1), found), -1)
        return (
            every.detach(),
            scores.entropies,
            torch.autograd.grad((every * weights).sum(), inputs),
        )

    whole, entropies, (of_hidden, of_weight) = score(weight)
    ranks = run_ranks(lambda group: score(weight.chunk(NUM_RANKS)[group.rank()], group))
    for found in ranks:
        torch.testing.assert_close(found[:2], (whole, entropies), rtol=1e-12, atol=1e-12)
    gradients = [own for *_, own in ranks]
    torch.testing.assert_close(sum(of for of, _ in gradients), of_hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([of for _, of in gradients]), of_weight)


def test_unchecked_labels_outside_the_vocabulary_give_nan(run_ranks):
    labels = torch.tensor([3, 8, -1, 8])
    mask = torch.tensor([True, True, True, False])

    def score(group):
        found = linear_cross_entropy(
            torch.ones(4, 2),
            torch.ones(2, 2),
            labels,
            loss_mask=mask,
            group=group,
            check_labels=False,
        )
        return found.losses.isnan().tolist()

    assert run_ranks(score) == [[False, True, True, False]] * NUM_RANKS


@pytest.mark.parametrize("vocab_size", [1000, 700, 6])
def test_ranks_that_share_a_vocabulary_find_the_likeliest_tokens(run_ranks, vocab_size):
    """Of few distinct logits, so that ranks have equal ones; not every row names a token."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(0, 3, (20, 4), generator=generator).double()
    weight = torch.randint(-2, 3, (1024, 4), generator=generator).double()
    weight[vocab_size:] = 1e4
    labels = torch.randint(vocab_size, (20,), generator=generator)
    num_ids = vocab_size - vocab_size // 4
    whole = score_with_likeliest(
        hidden, OutputLayer(weight[:vocab_size]), labels, 5, vocab_size=num_ids
    )

    def score(group):
        own = OutputLayer(weight.chunk(NUM_RANKS)[group.rank()])
        share = VocabularyShare.of(256, vocab_size, group)
        return score_with_likeliest(hidden, own, labels, 5, vocab_size=num_ids, share=share)

    for found in run_ranks(score):
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


# Ranks of 300 rows begin inside blocks of 256; the last one's are cut, or nothing but padding.
@pytest.mark.parametrize(("vocab_size", "num_ids"), [(1150, 1000), (1150, 620), (280, 270)])
@pytest.mark.parametrize("at_once", [1, 600, 2000])
def test_ranks_that_share_a_vocabulary_draw_what_one_process_draws(
    run_ranks, monkeypatch, vocab_size, num_ids, at_once
):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 8, dtype=torch.float64, generator=generator)
    weight = torch.randn(1200, 8, dtype=torch.float64, generator=generator)
    weight[vocab_size:] = 1e4
    labels = torch.randint(-1, vocab_size, (400,), generator=generator)
    keys = torch.from_numpy(draw_keys(np.arange(400), seed=0))

    def draw(own_weight, group=None):
        tail, share = TailDraws(keys, 3), VocabularyShare.of(len(own_weight), vocab_size, group)
        layer = OutputLayer(own_weight, 0.5, 3.0)
        more = {"vocab_size": num_ids, "share": share, "tail": tail}
        found = score_with_likeliest(hidden, layer, labels, 5, **more)
        return (*found, tail.ids)

    whole = draw(weight)
    assert len(whole[-1].unique()) > 200
    monkeypatch.setattr("pipeline.guidance.likeliest.rows_at_once", lambda *_: at_once)
    for found in run_ranks(lambda group: draw(weight.chunk(NUM_RANKS)[group.rank()], group)):
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
