"""Distribute a teacher's layers over pipeline stages.

The output layer is on the last stage and costs as much as several layers: Qwen2.5-7B's as 2.3 of
its 28. The slowest stage limits a pipeline, so an even cut wastes 19 % of four stages, and a third
of Llama-3-8B's eight.
"""

from collections.abc import Sequence

from megatron_plugin.models.shape import ModelShape
from pipeline.command_line.failures import hinted


def output_cost(shape: ModelShape) -> float:
    """Return the output layer's cost per token, in layers.

    Counts products with weights only: attention's own cost depends on the documents' lengths, and
    the embedding is a look-up.
    """
    return shape.vocab_size * shape.hidden_size / shape.weights_per_layer


def cut_layers(num_layers: int, num_stages: int, output: float) -> tuple[int, ...]:
    """Return the numbers of layers per stage that minimise the slowest stage's time.

    Each stage has at least one layer, else ValueError; the last one also has the output layer,
    which costs `output` layers. Stages with one layer more come last before it, since the first
    holds the embedding's memory.

    Example:
        >>> cut_layers(28, 4, 2.34)
        (7, 8, 8, 5)
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
    # Of equally fast cuts the most even one.
    last = min(choices, key=lambda n: (max(-(-(num_layers - n) // others), n + output), -n))
    each, rest = divmod(num_layers - last, others)
    return (*(each + (stage >= others - rest) for stage in range(others)), last)


def megatron_layout(layers: Sequence[int]) -> list[list[str]]:
    """Return the cut as Megatron's `pipeline_model_parallel_layout`."""
    stages = [["decoder"] * count for count in layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
