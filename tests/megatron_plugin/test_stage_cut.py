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


def test_the_output_layer_costs_several_layers():
    qwen2_5_7b = {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    shape = shape_of_config(make_model("qwen2").config.to_dict() | qwen2_5_7b | {"head_dim": None})
    assert output_cost(shape) == pytest.approx(2.34, abs=0.005)
    assert cut_layers(28, 4, output_cost(shape)) == (7, 8, 8, 5)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers can't fill 3 pipeline stages"):
        cut_layers(2, 3, 1.0)


def test_a_cut_is_megatrons_layout():
    assert megatron_layout((3, 1)) == [["embedding", *["decoder"] * 3], ["decoder", "loss"]]
