"""What training and scoring cost in arithmetic, by a rule that no clock disturbs.

Two operations (a product and a sum) per weight and token forward, four backward; the output layer
runs backward for kept tokens alone. Attention between tokens is left out: below a tenth at these
lengths, for student and teacher alike. So is what an implementation computes twice.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from vocag import open_dataset

FORWARD, BACKWARD = 2, 4


@dataclass(frozen=True)
class Weights:
    """Weights that every token is multiplied with.

    Attributes:
        layers: of all layers.
        output: of the output layer.
    """

    layers: int
    output: int


def read_weights(folder: Path) -> Weights:
    """Count a model's weights, from its files' heads."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    layers = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                shape = file.get_slice(name).get_shape()
                if ".layers." in name and len(shape) == 2:
                    layers += shape[0] * shape[1]
    return Weights(layers, config["vocab_size"] * config["hidden_size"])


def training_cost(student: Weights, kept: float = 1.0) -> float:
    """Return the operations per token of training where a share of the tokens is kept.

    Example:
        >>> training_cost(Weights(10, 1)), training_cost(Weights(10, 1), 0.5)
        (66.0, 64.0)
    """
    both = student.layers + student.output
    return FORWARD * both + BACKWARD * (student.layers + kept * student.output)


def scoring_cost(teacher: Weights, dataset: Path) -> float:
    """Return a teacher's operations per student token of a dataset, each document read once."""
    totals = open_dataset(str(dataset)).manifest.totals
    ratio = totals["num_teacher_tokens"] / totals["num_student_tokens"]
    return FORWARD * (teacher.layers + teacher.output) * ratio


def equal_steps(steps: int, own: float, plain: float) -> int:
    """Return how many plain steps cost as much as `steps` that cost `own` a token.

    Example:
        >>> equal_steps(400, own=3.0, plain=2.0)
        600
    """
    return round(steps * own / plain)
