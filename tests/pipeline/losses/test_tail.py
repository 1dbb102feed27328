"""Draws come as often as the tail says, whatever the chunks and batches, and never from the top."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.losses.likeliest import score_with_likeliest
from pipeline.losses.logits import OutputLayer
from pipeline.losses.tail import TailDraws, draw_keys
from tests.support.largest_tensor import LargestTensor

PLACES, VOCAB, HIDDEN, TOP, DRAWS = 6000, 700, 8, 5, 3


def keys(num_places: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(draw_keys(np.arange(num_places), seed))


def draw(
    hidden: torch.Tensor, layer: OutputLayer, labels: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest ids and the draws."""
    tail = TailDraws(more.pop("keys", keys(len(hidden))), DRAWS)
    _, ids, _ = score_with_likeliest(hidden, layer, labels, TOP, tail=tail, **more)
    return ids, tail.ids


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Return it with its degrees of freedom; cells below 5 are one."""
    large = expected >= 5
    rest = torch.stack((counts[~large].sum(), expected[~large].sum()))
    found = torch.cat((counts[large], rest[:1])), torch.cat((expected[large], rest[1:]))
    return float(((found[0] - found[1]) ** 2 / found[1].clamp_min(1e-9)).sum()), int(large.sum())


def test_they_are_the_ones_of_this_release() -> None:
    """Stored draws and those of a resumed run are one model's: other values mix two of them."""
    found = draw_keys(np.array([5, 7]), seed=0).tolist()
    assert found == [[4080391683, 3180947691], [453309473, 4037488632]]
    weight = torch.arange(VOCAB * HIDDEN, dtype=torch.float64).sin().mul(2).float()
    hidden = torch.arange(4 * HIDDEN, dtype=torch.float64).cos().float().view(4, HIDDEN)
    own = torch.from_numpy(draw_keys(np.array([5, 7, 7, 300]), 0))
    layer, labels = OutputLayer(weight.view(VOCAB, HIDDEN)), torch.tensor([1, 2, 3, -1])
    _, draws = draw(hidden, layer, labels, keys=own)
    assert draws.tolist() == [[389, 323, 257], [68, 130, 210], [493, 69, 87], [297, 487, 633]]


@pytest.mark.parametrize(
    ("vocab_size", "change", "label"),
    [(None, {}, 17), (690, {"cap": 3.0}, 600), (300, {"scale": 0.5}, -1), (None, {"peak": 20}, 3)],
)
def test_they_come_as_often_as_the_tail_says(vocab_size: Any, change: Any, label: int) -> None:
    """Also where the tail holds 1e-8 of the mass, which a difference from 1 could not tell."""
    torch.manual_seed(0)
    peak = change.pop("peak", 0) if change else 0
    state, weight = torch.randn(1, HIDDEN), torch.randn(VOCAB, HIDDEN)
    top = (state @ weight.T).topk(TOP).indices[0]
    weight[top] += peak * state / state.square().sum()
    layer = OutputLayer(weight, **change)
    labels = torch.full((PLACES,), label)
    ids, draws = draw(state.expand(PLACES, -1), layer, labels, vocab_size=vocab_size)
    tail = layer.logits(state).double().softmax(-1)[0]
    tail[ids[0]] = 0
    tail[vocab_size or VOCAB :] = 0
    if label >= 0:
        tail[label] = 0
    assert not peak or tail.sum() < 1e-6
    tail /= tail.sum()
    for number in (*range(DRAWS), slice(None)):
        own = draws[:, number].flatten()
        counts = torch.bincount(own, minlength=VOCAB).double()
        assert not counts[tail == 0].any()
        found, freedom = chi_square(counts, tail * len(own))
        assert freedom > 30
        assert abs(found - freedom) < 3.3 * math.sqrt(2 * freedom)  # one in a thousand
    # Neither two draws of a place nor those of its neighbour know of each other.
    for one, other in ((draws[:, 0], draws[:, 1]), (draws[1:, 0], draws[:-1, 0])):
        expected = float(tail.square().sum())
        noise = math.sqrt(expected / len(one))
        assert float((one == other).double().mean()) == pytest.approx(expected, abs=4 * noise)


def test_chunks_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    hidden, layer = torch.randn(300, HIDDEN), OutputLayer(torch.randn(5 * VOCAB, HIDDEN))
    labels = torch.randint(5 * VOCAB, (300,))
    whole = draw(hidden, layer, labels)[1]
    for rows in (1, 256, 777, 3000):
        monkeypatch.setattr("pipeline.losses.likeliest.rows_at_once", lambda *_, n=rows: n)
        assert (draw(hidden, layer, labels)[1] == whole).all()
    order = torch.randperm(300)
    for some in (*order.split(37), order[:1]):
        found = draw(hidden[some], layer, labels[some], keys=keys(300)[some])[1]
        assert (found == whole[some]).all()
    others = draw(hidden, layer, labels, keys=keys(300, seed=1))[1]
    assert (others == whole).double().mean() < 0.2


def test_rounding_to_16_bits_changes_few() -> None:
    """The noise decides, and not what thousands of tokens before one add up to."""
    torch.manual_seed(2)
    hidden, weight = torch.randn(500, 64), torch.randn(5 * VOCAB, 64) / 4
    labels = torch.zeros(500, dtype=torch.int64)
    exact = draw(hidden, OutputLayer(weight), labels)[1]
    rounded = draw(hidden.bfloat16(), OutputLayer(weight.bfloat16()), labels)[1]
    assert 0 < (exact != rounded).double().mean() < 0.05


def test_impossible_tokens_are_drawn_only_if_there_are_no_others() -> None:
    weight = torch.zeros(600, 1)
    weight[TOP + 1 :] = -torch.inf
    weight[599] = -3.0
    layer, hidden = OutputLayer(weight), torch.ones(20, 1)
    ids, draws = draw(hidden, layer, torch.full((20,), TOP))
    assert sorted(ids[0].tolist()) == list(range(TOP))
    assert (draws == 599).all()
    weight[599] = -torch.inf
    ids, draws = draw(hidden, layer, torch.full((20,), TOP))
    assert (draws > TOP).all(), "none of the likeliest, and not the label"


def test_no_whole_logits_are_held() -> None:
    hidden, layer = torch.randn(4096, 4), OutputLayer(torch.randn(5000, 4))
    for tail in (None, TailDraws(keys(4096), DRAWS)):
        with LargestTensor() as found:
            score_with_likeliest(hidden, layer, torch.zeros(4096).long(), TOP, tail=tail)
        assert 0 < found.num_elements <= 2**21


def test_keys_belong_to_all_of_a_text() -> None:
    """Texts that begin alike have other draws from their first token on."""
    one, other = draw_keys(np.array([5, 6, 7]), 0), draw_keys(np.array([5, 6, 8]), 0)
    assert (one != other).any(axis=1).all()
    again = draw_keys(np.array([5, 6, 7], np.uint16), 0)
    assert (one == again).all()
    assert (one != draw_keys(np.array([5, 6, 7]), 1)).any(axis=1).all()
    many = np.concatenate([draw_keys(np.arange(100), seed) for seed in range(100)])
    assert len(np.unique(many, axis=0)) == 10_000
    assert many.min() >= 0
    assert many.max() < 1 << 32
    bits = (many[:, :, None] >> np.arange(32)) & 1
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.025
