"""Distribute a teacher's layers over pipeline stages.

Qwen2.5-7B's output layer costs as much as 2.3 layers: an even cut would waste 19 % of four stages.
"""

from collections.abc import Sequence

from megatron_plugin.models.shape import ModelShape
from pipeline.command_line.failures import hinted


def output_cost(shape: ModelShape) -> float:
    """Return the output layer's cost per token, in layers, by products with weights."""
    return shape.vocab_size * shape.hidden_size / shape.weights_per_layer


def cut_layers(num_layers: int, num_stages: int, output: float) -> tuple[int, ...]:
    """Return the layers per stage that minimise the slowest stage's time.

    The last stage also has the output layer, which costs `output` layers; the first holds the
    embedding, so longer stages come last. ValueError for more stages than layers.
    """
    if num_stages > num_layers:
        option = "--vocag-teacher-pipeline-model-parallel-size"
        error = ValueError(
            f"the teacher's {num_layers} layers can't fill {num_stages} pipeline stages: lower "
            f"{option}"
        )
        raise hinted(error, f"{option} {num_layers}")
    if num_stages == 1:
        return (num_layers,)
    others = num_stages - 1
    choices = range(1, num_layers - others + 1)
    # The most even of equally fast cuts.
    last = min(choices, key=lambda n: (max(-(-(num_layers - n) // others), n + output), -n))
    each, rest = divmod(num_layers - last, others)
    return (*(each + (stage >= others - rest) for stage in range(others)), last)


def megatron_layout(layers: Sequence[int]) -> list[list[str]]:
    """Return the cut as Megatron's `pipeline_model_parallel_layout`."""
    stages = [["decoder"] * count for count in layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
