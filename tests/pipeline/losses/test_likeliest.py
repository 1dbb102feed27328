"""The likeliest tokens are those of whole logits, whatever the chunks, and ties go to lower ids."""

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.losses import cross_entropy
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.likeliest import score_with_likeliest
from pipeline.losses.logits import OutputLayer

TOKENS, VOCAB, HIDDEN = 40, 1000, 16


def likeliest_tokens(hidden: torch.Tensor, layer: OutputLayer, top_k: int) -> Any:
    labels = torch.zeros(len(hidden), dtype=torch.int64)
    return score_with_likeliest(hidden, layer, labels, top_k)[1:]


def slow(logits: torch.Tensor, top_k: int, vocab_size: int) -> tuple[Any, Any]:
    """Sort whole rows by falling logit, then by rising id."""
    log_probs = logits.double().log_softmax(-1).numpy()
    ids = np.stack(
        [np.lexsort((np.arange(vocab_size), -row[:vocab_size])) for row in logits.numpy()]
    )[:, :top_k]
    return ids, np.take_along_axis(log_probs, ids, 1)


@pytest.fixture(params=[1, 7, 128, 333, VOCAB], name="chunk")
def _chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.losses.likeliest.rows_at_once", lambda *_: request.param)
    monkeypatch.setattr(cross_entropy, "rows_at_once", lambda *_: request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    ("top_k", "vocab_size", "change"),
    [(16, None, {}), (1, None, {"cap": 3.0}), (255, 256, {"scale": 0.5}), (9, 900, {})],
)
def test_they_are_those_of_whole_logits(top_k: int, vocab_size: int | None, change: Any) -> None:
    torch.manual_seed(0)
    hidden, layer = torch.randn(TOKENS, HIDDEN), OutputLayer(torch.randn(VOCAB, HIDDEN), **change)
    labels = torch.randint(VOCAB, (TOKENS,))
    losses, ids, log_probs = score_with_likeliest(
        hidden, layer, labels, top_k, vocab_size=vocab_size
    )
    logits = layer.logits(hidden)
    expected = logits[:, :vocab_size].topk(top_k)
    torch.testing.assert_close(ids, expected.indices)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(1, ids), rtol=0, atol=1e-5)
    own = linear_cross_entropy(hidden, layer, labels).losses
    torch.testing.assert_close(losses, own, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_ones_go_to_lower_ids(dtype: torch.dtype) -> None:
    """Whole numbers, of which few differ: thousands of equal logits, and exact ones."""
    torch.manual_seed(1)
    hidden = torch.randint(-1, 2, (TOKENS, HIDDEN)).to(dtype)
    weight = torch.randint(-1, 2, (VOCAB, HIDDEN)).to(dtype)
    weight[500:] = weight[:500].flip(0)
    ids, log_probs = likeliest_tokens(hidden, OutputLayer(weight), 12)
    expected_ids, expected = slow(hidden.float() @ weight.float().T, 12, VOCAB)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(log_probs, expected, rtol=0, atol=1e-5)
    same = likeliest_tokens(hidden * 0, OutputLayer(weight), 12)[0]
    assert (same == torch.arange(12)).all()


def test_tokens_that_can_t_be_have_no_probability_and_nan_is_not_hidden() -> None:
    hidden, weight = torch.ones(1, 2), torch.zeros(300, 2)
    weight[3:] = -torch.inf
    ids, log_probs = likeliest_tokens(hidden, OutputLayer(weight), 5)
    assert ids[0, :3].tolist() == [0, 1, 2]
    assert log_probs[0].isneginf().tolist() == [False] * 3 + [True] * 2
    weight[7] = torch.nan
    assert likeliest_tokens(hidden, OutputLayer(weight), 5)[1].isnan().any()
    for top_k in (0, 301):
        with pytest.raises(ValueError, match=f"the likeliest {top_k} tokens of 300: ask for 1 to"):
            likeliest_tokens(hidden, OutputLayer(weight), top_k)
