"""Hugging Face weights to Megatron's parameters and back: not a bit may change."""

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("megatron.core")

from megatron_plugin.models.shape import UnsupportedModelError, read_shape, shape_of_config
from megatron_plugin.models.weight_rules import merge_weights, rule_for
from megatron_plugin.models.weight_sources import WeightsError, open_weights
from pipeline.models.teacher_files import BrokenFileError
from pipeline.models.weights import UnfittingWeightsError
from tests.megatron_plugin.models import FAMILIES, make_model, save_model

LAYER = (
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)


def parameter_names(shape):
    """Return the parameters of a whole Megatron model of this shape."""
    rest = [*LAYER]
    rest += ["self_attention.linear_qkv.bias"] * shape.qkv_bias
    if shape.qk_layernorm:
        rest += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
    layers = []
    for i in range(shape.num_layers):
        sparse = shape.experts is not None and shape.experts.layers[i]
        for name in rest:
            numbers = range(shape.experts.count) if sparse and ".linear_fc" in name else [None]
            for number in numbers:
                expert = "" if number is None else f"experts.local_experts.{number}."
                layers.append(f"decoder.layers.{i}.{name.replace('mlp.', 'mlp.' + expert)}")
        layers += [f"decoder.layers.{i}.mlp.router.weight"] * sparse
    outside = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    return outside + layers + ["output_layer.weight"] * (not shape.tied_embeddings)


class CountedTensor:
    """A tensor that counts the bytes which are taken of it."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tensor.shape
        self.num_bytes = 0

    def __getitem__(self, index):
        taken = self.tensor[index]
        self.num_bytes += taken.nbytes
        return taken


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_every_bit(tmp_path, family, num_ranks):
    """And each rank takes the bytes of its own parameters only."""
    save_model(tmp_path, family)
    weights = open_weights(str(tmp_path))
    slices = {}
    for name in parameter_names(weights.shape):
        rule = rule_for(name, weights.shape, padded_vocab_size=384)
        slices[name] = []
        for rank in range(num_ranks):
            full = [CountedTensor(weights.open(tensor)) for tensor in rule.names]
            own = rule.shard(full, rank, num_ranks)
            is_padded = len(own) == 384 // num_ranks and rank == num_ranks - 1
            held = own[: len(own) - (384 - 300)] if is_padded else own
            assert sum(each.num_bytes for each in full) == held.nbytes, name
            slices[name].append(own)
    merged = merge_weights(slices, weights.shape)
    expected = {}
    for path in tmp_path.glob("*.safetensors"):
        expected |= load_file(path)
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name


def test_groups_of_heads_that_ranks_can_t_share_are_cut_by_rows():
    shape = shape_of_config(make_model("llama").config.to_dict())
    full = [torch.arange(n).unsqueeze(1) + 100 * i for i, n in enumerate((32, 16, 16))]
    rule = rule_for("decoder.layers.0.self_attention.linear_qkv.weight", shape, padded_vocab_size=0)
    parts = [rule.shard(full, rank, 4) for rank in range(4)]
    assert [len(part) for part in parts] == [16] * 4
    assert torch.equal(torch.cat(parts), rule.shard(full, 0, 1))


def test_queries_keys_and_values_are_interleaved_by_group():
    shape = shape_of_config(make_model("llama").config.to_dict())
    rows = {"q": 32, "k": 16, "v": 16}
    full = [torch.arange(n).unsqueeze(1) + 100 * i for i, n in enumerate(rows.values())]
    rule = rule_for("decoder.layers.0.self_attention.linear_qkv.weight", shape, padded_vocab_size=0)
    first = rule.shard(full, 0, 2).squeeze(1).tolist()
    assert first == [*range(16), *range(100, 108), *range(200, 208)]


def test_padding_rows_are_zero():
    shape = shape_of_config(make_model("llama").config.to_dict())
    rule = rule_for("output_layer.weight", shape, padded_vocab_size=384)
    last = rule.shard([torch.ones(300, 2)], 1, 2)
    assert last.shape == (192, 2)
    assert last.sum() == 2 * (300 - 192)


def test_fused_norms_of_transformer_engine_are_the_same_tensors():
    shape = shape_of_config(make_model("llama").config.to_dict())
    for fused, norm in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        rules = [
            rule_for(f"decoder.layers.1.{name}", shape, padded_vocab_size=0)
            for name in (fused, norm)
        ]
        assert rules[0].names == rules[1].names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' isn't supported, only llama, mistral"),
        ({"attention_bias": True}, "attention_bias True isn't supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' isn't supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*fp8.* isn't"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters .*yarn.* isn'",
        ),
    ],
)
def test_parts_that_are_not_translated_are_refused(changes, message):
    config = make_model("llama").config.to_dict() | changes
    with pytest.raises(UnsupportedModelError, match=message):
        shape_of_config(config)


def test_sliding_window_shorter_than_a_row_is_refused():
    shape = shape_of_config(make_model("mistral", sliding_window=64).config.to_dict())
    shape.require_window(64, what="teacher")
    with pytest.raises(UnsupportedModelError, match="teacher attends to 64 tokens"):
        shape.require_window(65, what="teacher")


def test_missing_file_is_named(tmp_path):
    save_model(tmp_path, "llama")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    files[0].unlink()
    with pytest.raises(WeightsError, match=f"lacks 1 of the {len(files)} files.*{files[0].name}"):
        open_weights(str(tmp_path))


def test_a_cut_file_is_named(tmp_path):
    save_model(tmp_path, "llama")
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=rf"{path.name} \(\d+ bytes\) is cut or damaged: "):
        open_weights(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lose", r"1 missing \(model.layers.1.self_attn.k_proj.weight\)"),
        ("add", r"1 unexpected \(model.layers.1.self_attn.o_proj.bias\)"),
        ("cut", r"1 of another shape \(.*k_proj.weight \[8, 32\] instead of \[\d+, 32\]\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, family, change, message):
    """As transformers' loading refuses them: by one function, in the same words."""
    name = "model.layers.1.self_attn.k_proj.weight"
    save_model(tmp_path, family)
    weights = {}
    for path in tmp_path.glob("*.safetensors*"):
        weights |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    if change == "lose":
        del weights[name]
    elif change == "add":
        weights["model.layers.1.self_attn.o_proj.bias"] = torch.ones(32)
    else:
        weights[name] = weights[name][:8].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnfittingWeightsError, match=f"^{tmp_path}: its weights .*: {message}"):
        open_weights(str(tmp_path))


def test_quantised_numbers_are_refused(tmp_path):
    """They were taken for the weights themselves."""
    save_model(tmp_path, "llama")
    for path in tmp_path.glob("*.safetensors"):
        weights = load_file(path).items()
        save_file({n: w.to(torch.float8_e4m3fn) for n, w in weights}, path, {"format": "pt"})
    with pytest.raises(BrokenFileError, match=r"F8_E4M3, quantised numbers, .* name the model in"):
        open_weights(str(tmp_path))


def test_frequencies_are_those_of_transformers(tmp_path):
    for family in ("llama", "llama_scaled", "qwen3"):
        model = save_model(tmp_path / family, family)
        frequencies = read_shape(tmp_path / family).inverse_frequencies()
        assert torch.equal(frequencies, model.model.rotary_emb.inv_freq), family
