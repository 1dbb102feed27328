"""One selection, however the rows and tokens are shared among ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeline.guidance import NonFiniteLossError, SelectionRule, select_tokens

NUM_RANKS = 4
ROWS, SEQ_LENGTH = 8, 32
SELECTORS = ("teacher", "full", "random", "student_loss", "student_entropy", "teacher_loss")
STRATEGIES = ("include", "exclude", "mean")
CASES = tuple(itertools.product(SELECTORS, STRATEGIES, (0.01, 0.4, 0.73)))
SHARINGS = ("even rows", "uneven rows", "tokens")


def make_batch():
    """Losses with few distinct values, so that thresholds fall on ties; some rows all unmapped."""
    generator = torch.Generator().manual_seed(0)
    student, guidance, entropies = (
        torch.randint(0, 6, (ROWS, SEQ_LENGTH), generator=generator) * 0.3 for _ in range(3)
    )
    guidance[torch.rand(ROWS, SEQ_LENGTH, generator=generator) < 0.2] = torch.nan
    guidance[3:5] = torch.nan
    mask = torch.rand(ROWS, SEQ_LENGTH, generator=generator) < 0.9
    positions = torch.arange(ROWS * SEQ_LENGTH).view(ROWS, SEQ_LENGTH)
    # Uneven sums, so that a mean over other tokens than the whole group's would show.
    teacher = torch.rand(ROWS, SEQ_LENGTH, generator=generator) * torch.arange(ROWS)[:, None]
    teacher[torch.rand(ROWS, SEQ_LENGTH, generator=generator) < 0.3] = torch.nan
    return student, guidance, entropies, mask, positions, teacher


def share_of(tensor, rank, sharing):
    if sharing == "even rows":
        return tensor.chunk(NUM_RANKS)[rank]
    if sharing == "uneven rows":
        return tensor.split([3, 1, 0, 4])[rank]
    # As context parallelism does it: rank r holds pieces r and 2 * ranks - 1 - r of each row.
    pieces = tensor.chunk(2 * NUM_RANKS, dim=1)
    return torch.cat((pieces[rank], pieces[2 * NUM_RANKS - 1 - rank]), dim=1)


def select(batch, case, group=None, give_positions=False):
    student, guidance, entropies, mask, positions, teacher = batch
    selector, unmapped, fraction = case
    scope = "microbatch" if group is None else "group"
    return select_tokens(
        student,
        guidance,
        loss_mask=mask,
        rule=SelectionRule(selector, fraction, unmapped, scope, seed=5),
        group=group,
        teacher_losses=teacher,
        student_entropies=entropies,
        step=7,
        positions=positions if give_positions else None,
    )


def run_rank(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    group = dist.group.WORLD
    kept, thresholds = {}, {}
    for sharing in SHARINGS:
        batch = [share_of(tensor, rank, sharing) for tensor in make_batch()]
        for case in CASES:
            selection = select(batch, case, group, give_positions=sharing == "tokens")
            kept[sharing, case], thresholds[sharing, case] = selection.kept, selection.threshold
    batch = [share_of(tensor, rank, "even rows") for tensor in make_batch()]
    if rank == 2:
        batch[0] = batch[0].clone()
        batch[0][1, batch[3][1].nonzero()[0]] = torch.nan
    try:
        select(batch, CASES[0], group)
        error = None
    except NonFiniteLossError as caught:
        error = str(caught)
    torch.save((kept, thresholds, error, count_messages(rank, group)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def count_messages(rank, group):
    """Return the collectives that a choice takes, without ties at the threshold and with them."""
    batch = [share_of(tensor, rank, "even rows") for tensor in make_batch()]
    distinct = (torch.randperm(batch[0].numel()) + rank / NUM_RANKS).view_as(batch[0])
    calls = []
    for student in (distinct, torch.ones_like(distinct)):
        before, sent = (dist.all_reduce, dist.all_gather), []

        def counting(original, sent=sent):
            return lambda *given, **named: sent.append(1) or original(*given, **named)

        dist.all_reduce, dist.all_gather = map(counting, before)
        for unmapped in STRATEGIES:
            sent.clear()
            select([student, student * 0, *batch[2:]], ("teacher", unmapped, 0.4), group)
            calls.append(len(sent))
        dist.all_reduce, dist.all_gather = before
    return calls


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, args=(str(folder),), nprocs=NUM_RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARINGS)
def test_ranks_select_what_one_process_selects(ranks, sharing):
    batch = make_batch()
    for case in CASES:
        whole = select(batch, case)
        for rank, (kept, thresholds, *_) in enumerate(ranks):
            expected = share_of(whole.kept, rank, sharing)
            assert torch.equal(kept[sharing, case], expected), (case, rank)
            torch.testing.assert_close(
                thresholds[sharing, case], whole.threshold, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.slow
def test_the_batch_has_ties_that_ranks_could_break_differently(ranks):
    """A microbatch for each rank chooses otherwise, so the agreement above is no accident."""
    batch = make_batch()
    case = ("teacher", "include", 0.4)
    for rank in range(NUM_RANKS):
        alone = select([share_of(tensor, rank, "even rows") for tensor in batch], case)
        if not torch.equal(alone.kept, ranks[rank][0]["even rows", case]):
            return
    pytest.fail("every rank's own choice equals the group's choice")


@pytest.mark.slow
def test_a_broken_rank_stops_all_and_names_its_row(ranks):
    errors = [error for _, _, error, _ in ranks]
    assert errors[2].startswith("student_losses[1, ")
    for rank in (0, 1, 3):
        assert "of another rank are NaN or infinite" in errors[rank]


@pytest.mark.slow
def test_what_ranks_must_know_of_each_other_goes_in_one_message(ranks):
    """Then three histograms of losses, and five of positions where a tie has to be broken."""
    for *_, calls in ranks:
        assert calls == [4, 4, 4, 9, 9, 9]


def test_a_group_needs_scope_group():
    with pytest.raises(ValueError, match="scope 'row' does not take a process group"):
        select_tokens(
            torch.ones(1, 1),
            torch.ones(1, 1),
            loss_mask=torch.ones(1, 1),
            rule=SelectionRule(scope="row"),
            group=dist.ProcessGroup(0, 1),
        )
