"""Every model keeps packed documents apart, or is refused when it is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OpenAIGPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from pipeline.command_line.failures import hints_of
from pipeline.models import varlen
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.packed_attention import PACKED_ATTENTION, find_bounds
from pipeline.models.packed_check import LeakingRowsError, keep_documents_apart, short_windows
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.transformers import load_scorer
from tests.support.streaming_data import around

VOCABULARY, WINDOW = 64, 6
LENGTHS = ([1, 20, 4, 15], [40], [11, 2, 27])
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
SLIDING = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=SLIDING),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2_sliding": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, layer_types=SLIDING
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


def make(name: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name](), **options)
    return model.train(False)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(VOCABULARY, (len(LENGTHS), 40), generator=generator)
    places = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
    return input_ids, torch.stack(places)


@pytest.mark.parametrize("attention", [PACKED_ATTENTION, "sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_document_has_the_states_that_it_has_alone(name: str, attention: str) -> None:
    """Windows are shorter than documents; the reference is eager attention over one document."""
    reference, model = make(name, attn_implementation="eager"), make(name)
    keep_documents_apart(model, attention)
    input_ids, position_ids = rows()
    num_compared = 0
    with torch.no_grad():
        packed = hidden_states(model, input_ids, position_ids=position_ids)
        for row, lengths in enumerate(LENGTHS):
            parts = zip(input_ids[row].split(lengths), packed[row].split(lengths), strict=True)
            for ids, states in parts:
                alone = reference.model(input_ids=ids[None]).last_hidden_state[0]
                torch.testing.assert_close(states, alone, rtol=1e-4, atol=1e-4)
                num_compared += 1
    assert num_compared == 8


@pytest.mark.parametrize("name", CONFIGS)
def test_the_fast_attention_is_taken_and_its_gradient_is_right(name: str) -> None:
    input_ids, position_ids = rows()
    gradients = []
    for attention in (None, "eager"):
        model = make(name)
        keep_documents_apart(model, attention)
        assert model.config._attn_implementation == (attention or PACKED_ATTENTION)
        hidden_states(model, input_ids, position_ids=position_ids).square().mean().backward()
        gradients.append([p.grad for p in model.model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_s_other_senses_keep_their_own_attention() -> None:
    """Gemma 4's part for sounds refuses sdpa; a text model within has the windows."""
    text = SIZES | {"sliding_window": 16, "layer_types": SLIDING, "num_kv_shared_layers": 0}
    more = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY}
    sound = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(1)
    config = Gemma4Config(text_config=text | more, vision_config=None, audio_config=sound)
    model = AutoModelForCausalLM.from_config(config).train(False)
    assert config.audio_config._attn_implementation == "eager"
    with short_windows(model):
        assert config.text_config.sliding_window == WINDOW
    assert config.text_config.sliding_window == 16
    keep_documents_apart(model)
    assert config.text_config._attn_implementation == PACKED_ATTENTION


def test_the_check_changes_nothing_but_the_attention() -> None:
    model = make("mistral").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    keep_documents_apart(model)
    assert model.training
    assert model.config.sliding_window == WINDOW
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_plain_calls_and_generation_are_as_before() -> None:
    model, plain = make("mistral"), make("mistral", attn_implementation="sdpa")
    keep_documents_apart(model)
    input_ids, _ = rows()
    mask = torch.ones_like(input_ids)
    mask[0, :9] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, plain(input_ids).logits)
        _, position_ids = rows()  # as a trainer of somebody else's passes them
        given = model.model(input_ids, position_ids=position_ids, use_cache=False)
        packed = hidden_states(model, input_ids, position_ids=position_ids)
        torch.testing.assert_close(given.last_hidden_state, packed)
        given = (m(input_ids, attention_mask=mask).logits[0, 9:] for m in (model, plain))
        torch.testing.assert_close(*given)
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        made = (m.generate(input_ids[:, :12], **options) for m in (model, plain))
        assert torch.equal(*made)


def test_our_attention_is_not_saved_with_a_model(tmp_path: Any) -> None:
    model = make("llama")
    keep_documents_apart(model)
    model.save_pretrained(tmp_path)
    assert "vocag" not in (tmp_path / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_that_ignores_positions_is_refused_by_name() -> None:
    """Mamba's state goes on from document to document."""
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(LeakingRowsError, match=r"MambaForCausalLM \(mamba\) .* vocag score") as no:
        keep_documents_apart(model)
    assert hints_of(no.value) == ["hint: one_document_a_row=True"]
    keep_documents_apart(model, packed=False)


def test_attention_that_is_weak_still_leaks() -> None:
    """A new GPT's does, next to its learned positions, and grows in training."""
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(OpenAIGPTConfig(**sizes))
    for name, weight in model.named_parameters():
        if "attn" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    with pytest.raises(LeakingRowsError, match=r"OpenAIGPTLMHeadModel \(openai-gpt\)"):
        keep_documents_apart(model)
    keep_documents_apart(model, packed=False)


def test_a_model_that_sees_what_comes_after_is_refused_on_rows_of_one_document() -> None:
    model = make("llama")

    def look_ahead(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1)
        return output

    keep_documents_apart(model, packed=False)
    model.model.register_forward_hook(look_ahead, with_kwargs=True)
    with pytest.raises(LeakingRowsError, match="rows of one document and padding: ") as no:
        keep_documents_apart(model, packed=False)
    assert hints_of(no.value) == []


def test_what_a_model_s_code_raises_is_a_sentence() -> None:
    """Of every kind, as an attention that isn't for it."""
    model = make("llama")

    def fail(*_: Any) -> None:
        raise AttributeError("no such state")

    model.model.register_forward_pre_hook(fail)
    message = r"LlamaForCausalLM \(llama\).*sdpa: AttributeError: no such state"
    with pytest.raises(LeakingRowsError, match=message):
        keep_documents_apart(model, "sdpa")


def test_too_little_memory_is_no_fault_of_an_attention() -> None:
    """Commands name what to lower."""

    def no_gpu(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def no_cpu(*_: Any) -> None:
        torch.empty(1 << 50)

    for fail, told in ((no_gpu, "^CUDA out of memory"), (no_cpu, "^.enforce fail at alloc_cpu")):
        model = make("llama")
        model.model.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match=told):
            keep_documents_apart(model)


def test_a_model_that_chooses_its_keys_is_never_given_all() -> None:
    """MiniMax-M3 told our attention alone which blocks count, and counts them from a row's start.

    Both show in rows that are longer than the check's.
    """
    pytest.importorskip("transformers.models.minimax_m3_vl")
    indexer = {"index_n_heads": 2, "index_head_dim": 8}
    few = {"num_local_experts": 2, "num_experts_per_tok": 1, "rotary_dim": 8}
    layers = {"layer_types": ["minimax_m3_sparse", "full_attention"]}
    given = SIZES | indexer | few | layers
    torch.manual_seed(1)
    config = AutoConfig.for_model("minimax_m3_vl_text", **given)
    model = AutoModelForCausalLM.from_config(config).train(False)
    refused = r"vocag_packed: ValueError: .*block_indices.*sdpa: they differ by up to"
    with pytest.raises(LeakingRowsError, match=refused):
        keep_documents_apart(model)
    keep_documents_apart(model, packed=False)
    assert model.config._attn_implementation == "sdpa"


def test_gpt_oss_is_refused_on_packed_rows_and_scores_a_document_at_a_time(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = GptOssConfig(
        **SIZES,
        num_local_experts=2,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=SLIDING,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(LeakingRowsError, match=r"GptOssForCausalLM \(gpt_oss\)"):
        load_language_model(str(tmp_path))
    rule = ContextRule.of_rows(PackingRules(32, 32, around(1, 1), around(1, 1)))
    scorer = load_scorer(str(tmp_path), rule, dtype="float32")
    assert scorer.vocab_size == VOCABULARY


def test_a_mask_that_lets_documents_see_each_other_is_found() -> None:
    """As transformers masked packed rows before 4.53: by causal order alone."""
    model = make("llama")

    def forget_positions(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": torch.ones(kwargs["input_ids"].shape)}

    model.model.register_forward_pre_hook(forget_positions, with_kwargs=True)
    with pytest.raises(LeakingRowsError, match="sdpa: they differ by up to"):
        keep_documents_apart(model, "sdpa")


def test_bounds_are_where_positions_start_again() -> None:
    _, position_ids = rows()
    lengths = [n for own in LENGTHS for n in own]
    assert find_bounds(position_ids).diff().tolist() == lengths
    going_on = torch.tensor([[0, 1], [2, 3]])
    assert find_bounds(going_on).tolist() == [0, 2, 4]


def test_batches_share_a_few_of_cudnns_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps one for each number of documents and each longest document that it is given."""
    model, graphs, numbers = make("llama"), set(), set()
    keep_documents_apart(model)

    def keep_key(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *given: Any, **_: Any):  # type: ignore[no-untyped-def]
        graphs.add((len(bounds), given[1]))
        return query

    monkeypatch.setattr(varlen, "fits_kernel", lambda *_: True)
    monkeypatch.setattr(varlen, "why_not_cudnn", lambda *_: None)
    monkeypatch.setattr(varlen, "varlen_attn", keep_key)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        starts = torch.rand(4, 100, generator=generator) < 0.1
        places = torch.arange(100).expand(4, -1)
        firsts = torch.where(starts, places, 0).cummax(1).values
        numbers.add(len(find_bounds(places - firsts)))
        hidden_states(model, torch.zeros(4, 100), position_ids=places - firsts)
    assert len(numbers) > 3
    assert graphs <= {(33, 100), (65, 100)}
