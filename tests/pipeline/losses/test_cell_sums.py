"""Probabilities of cells and their gradients, against sums over the whole vocabulary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.losses import logits
from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.logits import OutputLayer


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    numbers=st.lists(st.integers(0, 5), min_size=11, max_size=11),
    padding=st.sampled_from([0, 3]),
    cap=st.sampled_from([None, 2.0]),
    chunk=st.sampled_from([1, 4, 64]),
)
def test_a_cell_has_the_probability_of_its_tokens(seed, numbers, padding, cap, chunk):
    torch.manual_seed(seed)
    cells = Cells.of([numbers.index(number) for number in numbers])
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11 + padding, 4, dtype=torch.float64, requires_grad=True)
    labels, entry_ids = torch.randint(11, (7,)), torch.randint(-1, 11, (7, 5))
    layer = OutputLayer(weight, scale=0.5, cap=cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits, "_MIN_CHUNK_ROWS", 1)
        patch.setattr(logits, "_CPU_CHUNK_ELEMENTS", 7 * chunk)
        scores = linear_cross_entropy(
            hidden, layer, labels, vocab_size=11, entry_ids=entry_ids, cells=cells
        )
    q = layer.logits(hidden)[:, :11].softmax(-1)
    of_cell = torch.stack([q[:, cells.numbers == n].sum(-1) for n in cells.numbers], -1).log()
    expected = of_cell.gather(1, entry_ids.clamp_min(0)).masked_fill(entry_ids < 0, -torch.inf)
    torch.testing.assert_close(scores.entry_log_probs, expected)
    shares = torch.rand(7, 5, dtype=torch.float64)
    known = entry_ids >= 0

    def loss(log_probs, losses):
        return losses.sum() - (shares * log_probs.where(known, 0.0)).sum()

    plain = loss(expected, -q.log().gather(1, labels[:, None]).squeeze(1))
    found = torch.autograd.grad(loss(scores.entry_log_probs, scores.losses), (hidden, weight))
    torch.testing.assert_close(found, torch.autograd.grad(plain, (hidden, weight)))


def test_tokens_beyond_the_cells_stand_for_themselves():
    placed = Cells.of([0, 0, 2]).on(torch.device("cpu"))
    assert placed.number_of(torch.tensor([-1, 0, 1, 2, 9])).tolist() == [-1, 0, 0, 2, 9]
    singles, places = placed.split(torch.tensor([-1, 0, 1, 2, 9]))
    assert singles.tolist() == [-1, -1, -1, 2, 9]
    assert places.tolist() == [-1, 0, 0, -1, -1]
