"""A small training job that tests change in one point at a time."""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_plugin.models.shape import read_shape
from megatron_plugin.models.weight_rules import merge_weights
from tests.megatron_plugin.forked_ranks import fork_ranks
from tests.megatron_plugin.models import save_model
from tests.support.datasets import build_dataset, make_texts

SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH = 64, 2, 8
SEED = 1234  # Megatron's default
ONE = {}
PIPELINE = {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
INTERLEAVED = {**PIPELINE, "num_layers_per_virtual_pipeline_stage": 1}
TRAINER = "tests.megatron_plugin.trainer"


@dataclass(frozen=True)
class Inputs:
    """What jobs read: a dataset, a held-out one, and two models of different vocabularies."""

    data: Path
    validation: Path
    student: Path
    teacher: Path


def make_inputs(folder):
    build_dataset(folder / "data", make_texts(80), num_shards=2)
    build_dataset(folder / "validation", make_texts(40, seed=1), num_shards=1)
    save_model(folder / "student", "qwen2_tied", vocab_size=400, seed=1, num_hidden_layers=4)
    # Three layers are cut unevenly in a pipeline of two.
    save_model(folder / "teacher", "llama_scaled", vocab_size=480, seed=2, num_hidden_layers=3)
    return Inputs(*(folder / name for name in ("data", "validation", "student", "teacher")))


def arguments(inputs, **changes):
    """Return the trainer's command line; a change of None leaves an option out."""
    options = {
        "vocag-data": inputs.data,
        "vocag-student": inputs.student,
        "vocag-teacher": inputs.teacher,
        "vocag-method": "teacher",
        "vocag-teacher-dtype": "float32",
        "vocag-allow-untrained-teacher": "",
        "seq-length": SEQ_LENGTH,
        "micro-batch-size": MICRO_BATCH,
        "global-batch-size": GLOBAL_BATCH,
        "train-iters": 1,
        "lr": "1e-3",
        "min-lr": "1e-4",
        "lr-decay-style": "constant",
        "eval-iters": 0,
        "log-interval": 1,
        "distributed-backend": "gloo",
        "distributed-timeout-minutes": 8,
        "calculate-per-token-loss": "",
        "num-workers": 0,
        "use-cpu-initialization": "",
        "no-bias-swiglu-fusion": "",
        "no-bias-dropout-fusion": "",
    }
    options |= {name.replace("_", "-"): value for name, value in changes.items()}
    if options["vocag-teacher"] is None:
        options |= {"vocag-teacher-dtype": None, "vocag-allow-untrained-teacher": None}
    command = []
    for name, value in options.items():
        if value is not None:
            command += [f"--{name}", *(str(value),) * (value != "")]
    return command


def train(inputs, num_ranks, dump=None, *, environment=None, **changes):
    """Run a job on the ranks of both worlds; `changes` are of its arguments, and `check`."""
    check, environment = changes.pop("check", True), dict(environment or {})
    if dump:
        environment["VOCAG_TEST_DUMP"] = str(dump)
        dump.mkdir(parents=True, exist_ok=True)
    command = arguments(inputs, **changes)
    return fork_ranks(num_ranks, TRAINER, *command, check=check, **environment)


def merged(folder, what, student):
    """Return what all student ranks have dumped, by Hugging Face name."""
    slices, seen = {}, set()
    for path in sorted(folder.glob(f"{what}-*.pt")):
        part = torch.load(path)
        for name, tensor in part["slices"].items():
            key = (name, part["tensor"])
            if part["replica"] == 0 or key not in seen:
                slices.setdefault(name, {})[part["tensor"]] = tensor
            seen.add(key)
    assert slices, f"no {what} in {folder}"
    ordered = {
        name: [by_rank[rank] for rank in sorted(by_rank)] for name, by_rank in slices.items()
    }
    return merge_weights(ordered, read_shape(student))


def require_equal(folder, inputs, expected, *, rtol=1e-4, atol=1e-6):
    """Compare a job's first gradients with those of one process; atol is by the largest of them."""
    found = merged(folder, "gradients", inputs.student)
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=atol * scale, msg=name)
