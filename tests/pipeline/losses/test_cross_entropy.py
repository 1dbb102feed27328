import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.losses import cross_entropy
from pipeline.losses.chosen_entries import ComparedEntries
from pipeline.losses.cross_entropy import linear_cross_entropy, map_token_chunks, score_tokens
from pipeline.losses.likeliest import score_with_likeliest
from pipeline.losses.logits import OutputLayer
from pipeline.losses.tail import TailDraws, draw_keys
from tests.support import reference_guidance as reference
from tests.support.largest_tensor import LargestTensor

VOCAB, HIDDEN = 700, 8
SEVERAL_CHUNKS = 12 * 130  # 12 tokens by 130 rows: five full chunks and one shorter


def hold_at_once(monkeypatch, elements):
    for device in ("CPU", "ACCELERATOR"):
        monkeypatch.setattr(f"pipeline.losses.logits._{device}_CHUNK_ELEMENTS", elements)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    hold_at_once(monkeypatch, 1)


def make_inputs(num_tokens=12, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    return hidden, weight, labels


@pytest.mark.parametrize("chunk_elements", [1, SEVERAL_CHUNKS, 2**21])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_losses_and_entropies_equal_the_float64_oracle(
    monkeypatch, chunk_elements, dtype, tolerance
):
    hold_at_once(monkeypatch, chunk_elements)
    hidden, weight, labels = make_inputs(dtype=dtype)
    scores = linear_cross_entropy(hidden, weight, labels, with_entropy=True)
    losses, entropies = reference.token_losses(
        hidden.double().numpy(), weight.double().numpy(), labels.numpy()
    )
    assert scores.losses.dtype == dtype
    np.testing.assert_allclose(scores.losses, losses, atol=tolerance)
    np.testing.assert_allclose(scores.entropies, entropies, atol=tolerance)


@pytest.mark.parametrize("chunk_elements", [1, 2**21])
def test_excluded_tokens_have_no_entropy(monkeypatch, chunk_elements):
    """Logits of -inf: of whole chunks of the vocabulary, and of the label itself."""
    hold_at_once(monkeypatch, chunk_elements)
    hidden, weight, labels = make_inputs(dtype=torch.float64)
    hidden, weight = hidden[:, :1].abs() + 0.1, weight[:, :1].clone()
    weight[:300] = weight[500::3] = -torch.inf
    labels[:4] = torch.tensor([0, 299, 500, 301])
    scores = linear_cross_entropy(hidden, weight, labels, with_entropy=True)
    losses, entropies = reference.token_losses(hidden.numpy(), weight.numpy(), labels.numpy())
    np.testing.assert_allclose(scores.losses, losses, atol=1e-12)
    np.testing.assert_allclose(scores.entropies, entropies, atol=1e-12)
    assert scores.losses.isinf().tolist()[:4] == [True, True, True, False]
    assert (scores.entropies > 1).all()


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.125, None), (1.0, 3.0), (2.5, 3.0)])
@pytest.mark.parametrize("least_weight", [0.0, 0.3, 1.0])  # all tokens, some, none
def test_gradients_of_weighted_losses_equal_the_plain_path(scale, cap, least_weight):
    hidden, weight, labels = make_inputs(num_tokens=40, dtype=torch.float64)
    weights = torch.rand(40, dtype=torch.float64).sub_(least_weight).relu_()
    hidden.requires_grad_()
    weight.requires_grad_()
    layer = OutputLayer(weight, scale, cap)
    logits = layer.logits(hidden)
    assert cap is None or 0.9 * cap < logits.max() < cap
    plain = F.cross_entropy(logits, labels, reduction="none")
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    expected = torch.autograd.grad((plain * weights).sum(), (hidden, weight))
    scores = linear_cross_entropy(hidden, layer, labels, with_entropy=True)
    actual = torch.autograd.grad((scores.losses * weights).sum(), (hidden, weight))
    torch.testing.assert_close((scores.losses, scores.entropies), (plain, entropies))
    torch.testing.assert_close(actual, expected)


def make_entries(num_tokens, seed=1):
    """Five entries a token: any ids, some of -1, the label's among them, one named twice."""
    generator = torch.Generator().manual_seed(seed)
    entry_ids = torch.randint(-200, VOCAB, (num_tokens, 5), generator=generator).clamp_min(-1)
    entry_ids[0, 1], entry_ids[1, 1:4], entry_ids[2] = VOCAB - 1, 130, -1
    return entry_ids


@pytest.mark.parametrize("chunk_elements", [1, SEVERAL_CHUNKS, 2**21])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (2.5, 3.0)])
@pytest.mark.parametrize("loss_weight", [0.0, 1.0])
def test_entries_and_losses_together_have_the_gradients_of_the_plain_path(
    monkeypatch, chunk_elements, scale, cap, loss_weight
):
    hold_at_once(monkeypatch, chunk_elements)
    hidden, weight, labels = make_inputs(num_tokens=40, dtype=torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    entry_ids, mask = make_entries(40), torch.arange(40) % 7 != 0
    entry_ids[5, 0] = labels[5]
    layer = OutputLayer(weight, scale, cap)
    weights = torch.rand(40, 5, dtype=torch.float64).sub_(0.3).relu_()
    plain = layer.logits(hidden)[:, :600].log_softmax(-1)
    labels, entry_ids = labels % 600, entry_ids.where(entry_ids < 600, 599)
    known = mask[:, None] & (entry_ids >= 0)
    losses = -plain.gather(1, labels[:, None])[:, 0].where(mask, 0.0)
    entries = plain.gather(1, entry_ids.clamp_min(0)).where(known, -torch.inf)

    def total(losses, entries):
        return loss_weight * losses.square().sum() + (weights * entries.exp() * 3).sum()

    expected = torch.autograd.grad(total(losses, entries), (hidden, weight))
    scores = linear_cross_entropy(
        hidden, layer, labels, loss_mask=mask, vocab_size=600, entry_ids=entry_ids
    )
    found = torch.autograd.grad(total(scores.losses, scores.entry_log_probs), (hidden, weight))
    torch.testing.assert_close((scores.losses, scores.entry_log_probs), (losses, entries))
    torch.testing.assert_close(found, expected)


def test_bf16_inputs_keep_fp32_losses():
    hidden, weight, labels = make_inputs(num_tokens=64, dtype=torch.bfloat16)
    exact = F.cross_entropy(hidden.float() @ weight.float().T, labels, reduction="none")
    rounded = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")
    losses = linear_cross_entropy(hidden, weight, labels).losses
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, exact, atol=2e-5, rtol=0)
    assert (rounded - exact).abs().max() > 1e-3, "bf16 logits would have passed"
    found = linear_cross_entropy(hidden, weight, labels, entry_ids=labels[:, None])
    assert torch.equal(found.losses, losses)
    torch.testing.assert_close(found.entry_log_probs[:, 0], -exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("num_entries", [0, 3])
def test_a_single_label_has_the_scores_of_a_batch_of_one(num_entries):
    hidden, weight, labels = make_inputs(num_tokens=1)
    entry_ids = make_entries(9)[5:6, :num_entries]
    expected = linear_cross_entropy(hidden, weight, labels, entry_ids=entry_ids)
    found = linear_cross_entropy(hidden[0], weight, labels[0], entry_ids=entry_ids[0])
    assert torch.equal(found.losses, expected.losses[0])
    assert torch.equal(found.entry_log_probs, expected.entry_log_probs[0])


@pytest.mark.parametrize("change", [(1.0, None), (0.125, 3.0)])
def test_autocast_rounds_both_operands_and_nothing_else(change):
    """Losses and gradients are those of rounded states and weights; gradients stay wide."""
    hidden, weight, labels = make_inputs(num_tokens=64)
    found, expected = [], []
    for rounded, results in ((False, found), (True, expected)):
        inputs = [t.bfloat16().float() if rounded else t.clone() for t in (hidden, weight)]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not rounded):
            layer = OutputLayer(inputs[1], *change)
            scores = linear_cross_entropy(
                inputs[0], layer, labels, with_entropy=True, entry_ids=make_entries(64)
            )
            own = -layer.logits(inputs[0]).log_softmax(-1)[torch.arange(64), labels]
        loss = scores.losses.sum() + scores.entry_log_probs.exp().sum() + own.square().sum()
        results += [scores.losses, scores.entropies, scores.entry_log_probs, own]
        results += torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(found, expected)
    exact = linear_cross_entropy(hidden, OutputLayer(weight, *change), labels).losses
    assert (found[0] - exact).abs().max() > 1e-4, "nothing was rounded"


def test_autocast_leaves_fp64_alone():
    hidden, weight, labels = make_inputs(dtype=torch.float64)
    expected = linear_cross_entropy(hidden, weight, labels).losses
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight, labels).losses, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_logits_never_exist(dtype):
    hidden, weight, labels = make_inputs(num_tokens=256, dtype=dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    with LargestTensor() as plain:
        F.cross_entropy((hidden @ weight.T).float(), labels).backward()
    with LargestTensor() as chunked:
        scores = linear_cross_entropy(
            hidden, weight, labels, with_entropy=True, entry_ids=make_entries(256)
        )
        (scores.losses.sum() + scores.entry_log_probs.exp().sum()).backward()
    assert plain.num_elements == 256 * VOCAB
    assert chunked.num_elements <= 256 * 128


def test_huge_logits_neither_overflow_nor_vanish():
    hidden, weight, labels = make_inputs()
    scores = linear_cross_entropy(hidden * 1e4, weight, labels, with_entropy=True)
    expected = F.cross_entropy(hidden.double() @ weight.double().T * 1e4, labels, reduction="none")
    torch.testing.assert_close(scores.losses.double(), expected, rtol=1e-5, atol=1e-2)
    assert scores.entropies.isfinite().all()


def test_certain_predictions_have_loss_zero_and_never_less():
    weight = torch.eye(200)
    scores = linear_cross_entropy(weight * 37.3, weight, torch.arange(200), with_entropy=True)
    assert (scores.losses >= 0).all()
    assert scores.losses.max() < 1e-5


def test_masked_labels_count_nothing_and_may_hold_anything():
    hidden, weight, labels = make_inputs()
    mask = torch.arange(12) % 3 != 0
    labels[~mask] = -100
    hidden[0] = torch.nan
    hidden.requires_grad_()
    entry_ids = labels[:, None].where(mask[:, None], VOCAB + 7)
    scores = linear_cross_entropy(
        hidden, weight, labels, loss_mask=mask.float(), with_entropy=True, entry_ids=entry_ids
    )
    assert torch.equal(scores.entry_log_probs[:, 0] > -torch.inf, mask)
    assert torch.equal(scores.losses > 0, mask)
    assert torch.equal(scores.entropies > 0, mask)
    (scores.losses.sum() + scores.entry_log_probs.exp().sum()).backward()
    assert torch.equal(hidden.grad.abs().sum(-1) > 0, mask)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 5)])
def test_any_number_of_tokens_and_leading_dimensions(shape):
    _, weight, _ = make_inputs()
    hidden = torch.ones(*shape, HIDDEN, requires_grad=True)
    losses = linear_cross_entropy(hidden, weight, torch.zeros(shape, dtype=torch.int64)).losses
    losses.sum().backward()
    assert losses.shape == shape
    assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.full((12,), VOCAB)}, r"labels\[0\] is 700, outside"),
        ({"labels": torch.full((12,), -100)}, "set loss_mask to 0"),
        ({"labels": torch.ones(12, dtype=torch.uint8)}, r"torch\.uint8, not int64: give labels\."),
        ({"labels": torch.zeros(11, dtype=torch.int64)}, r"\(12, 8\) must be labels \(11,\)"),
        ({"output_layer": torch.zeros(VOCAB, 9)}, r"must be \[vocabulary, 8\]"),
        ({"vocab_size": 701}, r"vocab_size 701 must lie in 1\.\.700"),
        ({"entry_ids": torch.full((12, 2), VOCAB)}, r"entry_ids\[0, 0\] is 700, outside"),
        ({"entry_ids": torch.full((12, 2), -2)}, r"entry_ids\[0, 0\] is -2, outside"),
        ({"entry_ids": torch.zeros(12, dtype=torch.int64)}, r"\(12,\) must be int64, the labels'"),
        ({"entry_ids": torch.zeros(12, 2)}, r"entry_ids torch\.float32 \(12, 2\) must be int64"),
    ],
)
def test_wrong_inputs_are_named(change, message):
    hidden, weight, labels = make_inputs()
    inputs = {"hidden": hidden, "output_layer": weight, "labels": labels, **change}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**inputs)


def test_score_tokens_gives_each_token_its_own_loss():
    hidden, weight, input_ids = make_inputs()
    hidden, input_ids = hidden.view(2, 6, HIDDEN), input_ids.view(2, 6)
    # Row 0 holds documents of 4 and 2 tokens, row 1 one of 5 tokens and a token of padding.
    mask = torch.tensor([[0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0]]).bool()
    losses = score_tokens(hidden, weight, input_ids, teacher_loss_mask=mask)
    assert torch.equal(losses.isnan(), ~mask)
    for row, position in mask.nonzero().tolist():
        expected, _ = reference.token_losses(
            hidden[row, position - 1 : position].double().numpy(),
            weight.double().numpy(),
            input_ids[row, position : position + 1].numpy(),
        )
        np.testing.assert_allclose(losses[row, position], expected[0], atol=2e-5)


def test_score_tokens_refuses_a_loss_without_context():
    hidden, weight, input_ids = make_inputs()
    mask = torch.ones(2, 6)
    with pytest.raises(ValueError, match=r"teacher_loss_mask\[0, 0\] is True"):
        score_tokens(hidden.view(2, 6, -1), weight, input_ids.view(2, 6), teacher_loss_mask=mask)


def test_mapped_chunks_equal_the_whole_with_gradients():
    hidden, weight, _ = make_inputs(dtype=torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()

    def entropies(hidden):
        return torch.distributions.Categorical(logits=hidden @ weight.T).entropy()

    whole, chunked = entropies(hidden), map_token_chunks(entropies, hidden, chunk_tokens=5)
    torch.testing.assert_close(chunked, whole)
    expected = torch.autograd.grad(whole.square().sum(), (hidden, weight))
    actual = torch.autograd.grad(chunked.square().sum(), (hidden, weight))
    torch.testing.assert_close(actual, expected)
    with pytest.raises(ValueError, match="chunk_tokens must be positive, got 0"):
        map_token_chunks(entropies, hidden, chunk_tokens=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_agrees_with_the_cpu(gpu, dtype):
    found = []
    for device in ("cpu", gpu):
        *inputs, labels = (tensor.to(device) for tensor in make_inputs(num_tokens=64, dtype=dtype))
        inputs = [tensor.requires_grad_() for tensor in inputs]
        entry_ids = make_entries(64).to(device)
        scores = linear_cross_entropy(*inputs, labels, with_entropy=True, entry_ids=entry_ids)
        loss = scores.losses.sum() + scores.entry_log_probs.exp().sum()
        gradients = [tensor.float().cpu() for tensor in torch.autograd.grad(loss, inputs)]
        values = scores.losses, scores.entropies, scores.entry_log_probs
        found.append(([value.detach().cpu() for value in values], gradients))
    (expected, gradients), (actual, own_gradients) = found
    torch.testing.assert_close(actual, expected)
    # A gradient of logits is rounded to meet weights in bf16.
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(own_gradients, gradients, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("all_learn", [False, True])
def test_entries_that_are_compared_give_what_sorted_ones_give(monkeypatch, all_learn):
    """As on a device, where the host would wait to know which chunk holds which."""
    hidden, weight, labels = make_inputs(num_tokens=64, dtype=torch.float64)
    entry_ids = make_entries(64)
    entry_ids[:, 0] = entry_ids[:, 1]  # the same twice
    entry_ids[::3, 2] = -1
    weights = torch.rand(64, entry_ids.shape[1], dtype=torch.float64)
    found = []
    for compared in (False, True):
        if compared:
            monkeypatch.setattr(cross_entropy, "chosen_entries", ComparedEntries)
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        own = {"entry_ids": entry_ids, "all_learn": compared and all_learn}
        scores = linear_cross_entropy(*inputs, labels, **own)
        known = scores.entry_log_probs.masked_fill(entry_ids < 0, 0.0)
        loss = scores.losses.square().sum() + (known * weights).sum()
        found.append((scores.losses, known, *torch.autograd.grad(loss, inputs)))
    torch.testing.assert_close(found[1], found[0])


def test_a_gpu_draws_what_the_cpu_draws(gpu):
    """And finds the same tokens likeliest."""
    hidden, weight, labels = make_inputs(num_tokens=64)
    ids = np.arange(64)
    found = []
    for device in ("cpu", gpu):
        tail = TailDraws(torch.from_numpy(draw_keys(ids, seed=0)).to(device), 4)
        layer = OutputLayer(weight.to(device))
        given = hidden.to(device), layer, labels.to(device)
        losses, likeliest, log_probs = score_with_likeliest(*given, 8, tail=tail)
        found.append([each.cpu() for each in (losses, log_probs, likeliest, tail.ids)])
    torch.testing.assert_close(found[1], found[0])
