"""Scoring: each token's loss as one slow pass per piece gives it, batches as tight as promised."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.models.probe import UntrainedTeacherError
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.interface import require_trained_engine
from pipeline.scoring.engines.transformers import MAX_PADDING, Scorer, plan_batches
from pipeline.scoring.sidecars import DocumentTokens
from tests.support.streaming_data import around, make_documents, make_index

VOCAB, BOS = 61, 9
CONTEXT = around(BOS, BOS)


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
}
ROUTED = SIZES | {"num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": LATENT,
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(4)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def data():
    """Documents of 1 to 300 tokens: their index and teacher tokens."""
    documents = make_documents([40, 1, 300, 41, 39, 7, 100], seed=2)
    index = make_index(documents, [0] * 7, [b""] * 7)
    starts = np.concatenate([[0], np.cumsum(index.num_teacher_tokens)])
    ids = np.random.default_rng(0).integers(0, VOCAB, starts[-1])
    return index, DocumentTokens(ids, starts)


def rows(seq_length=64, teacher_seq_length=80, teacher=CONTEXT):
    return ContextRule.of_rows(
        PackingRules(seq_length, teacher_seq_length, around(1, 1, 2), teacher)
    )


def slow_positions(model, tokens, pieces, rule):
    """float64 [V] of every position of every document, None where nothing comes before.

    One pass per piece, whole logits; the last piece also says what follows its document.
    """
    found = []
    for n in range(len(pieces)):
        first = tokens.starts[pieces.document[n]]
        ids = tokens.input_ids[first + pieces.start[n] : first + pieces.stop[n]].tolist()
        context = rule.context_token(continues=bool(pieces.continues[n]))
        before = [] if context is None else [context]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*before, *ids]])).logits[0].double()
        after = [*(() if before else (None,)), *logits.log_softmax(-1).numpy()]
        is_last = first + pieces.stop[n] == tokens.starts[pieces.document[n] + 1]
        found += after[: len(ids) + is_last]
    return found


def slow_losses(model, tokens, pieces, rule):
    """What positions before tokens say of these."""
    ends = tokens.starts[1:] + np.arange(len(tokens.starts) - 1)
    positions = slow_positions(model, tokens, pieces, rule)
    before = [each for place, each in enumerate(positions) if place not in ends]
    return np.array([
        np.nan if log_probs is None else -log_probs[token]
        for log_probs, token in zip(before, tokens.input_ids, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("rule", [rows(), rows(teacher=around())])
@pytest.mark.parametrize("batch_tokens", [1, 200, 4096])
def test_losses_are_those_of_one_pass_per_piece(model, data, rule, batch_tokens):
    index, tokens = data
    pieces = rule.pieces(index)
    assert len(pieces) > 7
    counted = []
    scored = Scorer(model, rule, batch_tokens=batch_tokens).score(
        tokens, pieces, advance=counted.append
    )
    expected = slow_losses(model, tokens, pieces, rule)
    np.testing.assert_allclose(scored.losses, expected, rtol=0, atol=2e-5)
    num_without = 0 if rule.first_token_id is not None else len(pieces)
    assert np.isnan(scored.losses).sum() == num_without
    assert sum(counted) == len(tokens.input_ids)
    assert 0 <= scored.work.num_places - scored.work.num_tokens <= 0.05 * scored.work.num_places


@pytest.mark.parametrize("family", EXPERTS)
def test_mixtures_of_experts_score_as_any_other(family, data):
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **ROUTED | EXPERTS[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    index, tokens = data
    pieces = rows().pieces(index)
    expected = slow_losses(model, tokens, pieces, rows())
    scored = Scorer(model, rows()).score(tokens, pieces)
    np.testing.assert_allclose(scored.losses, expected, rtol=0, atol=2e-5)


def test_a_short_piece_is_read_as_alone_where_longer_ones_change_the_rotation(data):
    """As of Phi-3's 128k; a batch holds either."""
    torch.manual_seed(3)
    rotation = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    own = {"original_max_position_embeddings": 41, "pad_token_id": 0, "rope_parameters": rotation}
    config = AutoConfig.for_model("phi3", **SIZES, **own)
    model = AutoModelForCausalLM.from_config(config).eval()
    index, tokens = data
    pieces = rows().pieces(index)
    scored = Scorer(model, rows()).score(tokens, pieces)
    expected = slow_losses(model, tokens, pieces, rows())
    np.testing.assert_allclose(scored.losses, expected, rtol=0, atol=2e-5)
    lengths = np.array([40, 41, 3, 42])
    assert [b.tolist() for b in plan_batches(lengths, 2048, apart=40)] == [[3, 1], [0], [2]]


def test_batches_hold_each_piece_once_and_little_padding():
    lengths = np.random.default_rng(1).integers(1, 700, 999)
    batches = list(plan_batches(lengths, 2048))
    assert sorted(np.concatenate(batches).tolist()) == list(range(999))
    for batch in batches:
        places = lengths[batch].max() * len(batch)
        assert places <= 2048
        assert places - lengths[batch].sum() <= MAX_PADDING * places
    assert len(batches) < 250
    assert [b.tolist() for b in plan_batches(np.array([5000, 3]), 2048)] == [[0], [1]]
    assert not list(plan_batches(np.empty(0, np.int64), 2048))


def test_a_model_that_can_t_be_scored_with_is_refused(model, data):
    index, tokens = data
    with pytest.raises(
        ValueError, match=r"198 teacher tokens, the teacher was made for 96 positions"
    ):
        Scorer(model, rows(400, 200)).score(tokens, rows(400, 200).pieces(index))
    large = replace(tokens, input_ids=np.where(tokens.input_ids == 60, 61, tokens.input_ids))
    with pytest.raises(ValueError, match="holds teacher token 61, the teacher knows 61"):
        Scorer(model, rows()).score(large, rows().pieces(index))


def test_a_loss_that_is_not_finite_names_its_document(model, data):
    index, tokens = data
    model = LlamaForCausalLM(model.config)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    ids = np.where(tokens.input_ids == 5, 6, tokens.input_ids)
    ids[tokens.starts[3] + 10] = 5
    damaged = replace(tokens, input_ids=ids)
    with pytest.raises(NonFiniteLossError, match=r'of document "doc-3" is nan, and \d+ more'):
        Scorer(model, rows()).score(damaged, rows().pieces(index), names=index.document_id)


def test_a_teacher_that_guesses_is_refused():
    untrained = LlamaForCausalLM(LlamaConfig(**SIZES | {"initializer_range": 0.02}))
    scorer = Scorer(untrained, rows())
    chance = re.escape(f"{math.log(VOCAB):.2f}")
    with pytest.raises(UntrainedTeacherError, match=rf"chance is {chance}: its weights did not"):
        require_trained_engine(scorer, range(40))
