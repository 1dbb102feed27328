"""The teacher's pipeline is cut so that its slowest stage is as fast as can be."""

from itertools import combinations, pairwise

import pytest

pytest.importorskip("megatron.core")

from megatron_plugin.models.shape import shape_of_config
from megatron_plugin.models.stage_cut import cut_layers, megatron_layout, output_cost
from tests.megatron_plugin.models import make_model


def efficiency(layers, output):
    """Return the share of the stages' time that they work, a pipeline being full."""
    slowest = max(*layers[:-1], layers[-1] + output) if len(layers) > 1 else layers[0] + output
    return (sum(layers) + output) / (len(layers) * slowest)


def every_cut(num_layers, num_stages):
    for bounds in combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *bounds, num_layers)
        yield tuple(b - a for a, b in pairwise(ends))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("output", [0.0, 0.4, 1.0, 2.34, 30.0])
def test_no_other_cut_is_faster(num_stages, output):
    cuts = list(every_cut(11, num_stages))
    best = max(efficiency(cut, output) for cut in cuts)
    chosen = cut_layers(11, num_stages, output)
    assert chosen in cuts
    assert efficiency(chosen, output) == best


# Layers, width, width of the MLP, heads, groups and vocabulary of Qwen2.5-7B and Llama-3-8B.
SIZES = {
    "qwen2": (28, 3584, 18944, 28, 4, 152064),
    "llama": (32, 4096, 14336, 32, 8, 128256),
}
NAMES = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads"


@pytest.mark.parametrize(
    ("family", "num_stages", "even", "balanced", "cut"),
    [
        ("qwen2", 4, 0.81, 0.95, (7, 8, 8, 5)),
        ("llama", 8, 0.67, 0.86, (4, 4, 4, 4, 4, 5, 5, 2)),
    ],
)
def test_models_that_an_even_cut_slows(family, num_stages, even, balanced, cut):
    config = dict(zip([*NAMES.split(), "vocab_size"], SIZES[family], strict=True))
    other = make_model(family).config.to_dict()
    output = output_cost(shape_of_config(other | config | {"head_dim": None}))
    layers = config["num_hidden_layers"]
    assert efficiency([layers // num_stages] * num_stages, output) == pytest.approx(even, abs=0.005)
    assert cut_layers(layers, num_stages, output) == cut
    assert efficiency(cut, output) == pytest.approx(balanced, abs=0.005)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers can't fill 3 pipeline stages"):
        cut_layers(2, 3, 1.0)


def test_a_cut_is_megatrons_layout():
    assert megatron_layout((3, 1)) == [["embedding", *["decoder"] * 3], ["decoder", "loss"]]
