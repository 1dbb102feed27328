"""Run by torchrun: `megatron_plugin.pretrain_gpt` on the CPU, as a user would start it.

VOCAG_TEST_DUMP names a folder for the first step's gradients and the last step's weights.
"""

import os
from pathlib import Path

from tests.megatron import cpu_shim  # noqa: F401  before anything of megatron

# isort: split

import torch
from megatron.core import parallel_state
from megatron.training import training
from torch import distributed as dist

from megatron_plugin import pretrain_gpt
from megatron_plugin.hf_weights import whole_model_names


def dump_steps(folder):
    """Save the first step's gradients as the optimiser gets them, and each step's weights."""
    original = training.train_step

    def train_step(forward_step, iterator, model, optimizer, *rest, **named):
        step = optimizer.step

        def save_and_step():
            if not (folder / f"gradients-{dist.get_rank()}.pt").exists():
                save(folder, "gradients", model, lambda parameter: parameter.main_grad)
            return step()

        optimizer.step = save_and_step
        try:
            return original(forward_step, iterator, model, optimizer, *rest, **named)
        finally:
            optimizer.step = step
            save(folder, "weights", model, lambda parameter: parameter.detach())

    training.train_step = train_step


def save(folder, what, model, value):
    """Write one rank's slices, and which slices they are."""
    slices = {
        name: value(parameter).clone()
        for chunk in model
        for name, parameter in whole_model_names(chunk).items()
    }
    place = {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "replica": parallel_state.get_data_parallel_rank(),
    }
    torch.save({"slices": slices, **place}, folder / f"{what}-{dist.get_rank()}.pt")


# Megatron's checkpoint writer starts processes that import this file again.
if __name__ == "__main__":
    torch.set_num_threads(1)
    if "VOCAG_TEST_DUMP" in os.environ:
        dump_steps(Path(os.environ["VOCAG_TEST_DUMP"]))
    pretrain_gpt.main()
