"""The teacher's pipeline is cut so that its slowest stage is as fast as can be."""

from itertools import combinations, pairwise

import pytest

pytest.importorskip("megatron.core")

from megatron_plugin.arguments import read_options
from megatron_plugin.models.shape import shape_of_config
from megatron_plugin.models.stage_cut import (
    StageCutError,
    cut_layers,
    efficiency,
    megatron_layout,
    output_cost,
    require_cut,
)
from tests.megatron_plugin.models import make_model


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


@pytest.mark.parametrize(
    ("config", "num_stages", "even", "balanced", "cut"),
    [
        (
            {
                "model_type": "qwen2",
                "num_hidden_layers": 28,
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
            },
            4,
            0.81,
            0.95,
            (7, 8, 8, 5),
        ),
        (
            {
                "model_type": "llama",
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
            },
            8,
            0.67,
            0.86,
            (4, 4, 4, 4, 4, 5, 5, 2),
        ),
    ],
)
def test_models_that_an_even_cut_slows(config, num_stages, even, balanced, cut):
    other = make_model(config["model_type"]).config.to_dict()
    output = output_cost(shape_of_config(other | config | {"head_dim": None}))
    layers = config["num_hidden_layers"]
    assert efficiency([layers // num_stages] * num_stages, output) == pytest.approx(even, abs=0.005)
    assert cut_layers(layers, num_stages, output) == cut
    assert efficiency(cut, output) == pytest.approx(balanced, abs=0.005)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(StageCutError, match="2 layers can't fill 3 pipeline stages"):
        cut_layers(2, 3, 1.0)


@pytest.mark.parametrize("layers", [(9, 9, 8), (9, 9, 8, 3), (10, 10, 8, 0)])
def test_a_cut_that_does_not_add_up_is_refused(layers):
    with pytest.raises(StageCutError, match="name 4 numbers that add up to 28"):
        require_cut(layers, num_layers=28, num_stages=4)


def test_a_cut_by_hand_is_read(capsys):
    own = ["--vocag-data", "data", "--vocag-teacher", "m"]
    ranks = ["--vocag-teacher-world-size", "2", "--vocag-teacher-pipeline-model-parallel-size", "2"]
    read = read_options([*own, *ranks, "--vocag-teacher-layers-per-stage", "3", "1"])
    assert read.teacher.layers_per_stage == (3, 1)
    assert megatron_layout((3, 1)) == [["embedding", *["decoder"] * 3], ["decoder", "loss"]]
    with pytest.raises(SystemExit):
        read_options([*own, *ranks, "--vocag-teacher-layers-per-stage", "3,1"])
    assert "invalid int value: '3,1'" in capsys.readouterr().err
