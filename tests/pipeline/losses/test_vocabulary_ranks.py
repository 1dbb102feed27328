"""One loss, however the vocabulary is shared among ranks, which are threads here."""

import numpy as np
import pytest
import torch

from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.likeliest import score_with_likeliest
from pipeline.losses.logits import OutputLayer, VocabularyShare
from pipeline.losses.tail import TailDraws, draw_keys
from tests.support.rank_threads import NUM_RANKS


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


@pytest.mark.parametrize("top_k", [0, 9, 16])
def test_ranks_refuse_more_likeliest_tokens_than_there_are(run_ranks, top_k):
    """Each of them has fewer than 9, or none, and all refuse together."""
    labels = torch.zeros(3, dtype=torch.int64)

    def score(group):
        layer, share = OutputLayer(torch.ones(5, 2)), VocabularyShare.of(5, 8, group)
        with pytest.raises(ValueError, match=rf"the likeliest {top_k} tokens of 8: ask for 1 to 8"):
            score_with_likeliest(torch.ones(3, 2), layer, labels, top_k, share=share)
        return True

    assert run_ranks(score) == [True] * NUM_RANKS


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
    monkeypatch.setattr("pipeline.losses.likeliest.rows_at_once", lambda *_: at_once)
    for found in run_ranks(lambda group: draw(weight.chunk(NUM_RANKS)[group.rank()], group)):
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
