"""Run by torchrun: `megatron_plugin.pretrain_gpt` on the CPU, as a user would start it.

VOCAG_TEST_DUMP names a folder for the first step's gradients and the last step's weights.
"""

import os
from pathlib import Path

from tests.megatron import cpu_shim  # noqa: F401  before anything of megatron

import torch
from megatron.core.optimizer import optimizer as optimizers
from torch import distributed as dist

torch.set_num_threads(1)

from megatron_plugin import pretrain_gpt
from megatron_plugin.hf_weights import whole_model_names

DUMP = os.environ.get("VOCAG_TEST_DUMP")


def dump_steps(folder):
    """Save each step's gradients before the optimiser takes them, and the weights after."""
    original = optimizers.MixedPrecisionOptimizer.step
    original_fp32 = optimizers.FP32Optimizer.step
    del original

    def step(self, *args, **kwargs):
        from megatron.training import training

        chunks = training_models()
        gradients = {
            name: parameter.main_grad.clone()
            for chunk in chunks
            for name, parameter in whole_model_names(chunk).items()
        }
        first = folder / f"gradients-{dist.get_rank()}.pt"
        if not first.exists():
            torch.save(gradients, first)
        done = original_fp32(self, *args, **kwargs)
        weights = {
            name: parameter.detach().clone()
            for chunk in chunks
            for name, parameter in whole_model_names(chunk).items()
        }
        torch.save(weights, folder / f"weights-{dist.get_rank()}.pt")
        del training
        return done

    optimizers.FP32Optimizer.step = step


MODELS = []


def training_models():
    """Return this rank's model chunks, as Megatron built them."""
    return MODELS


def remember_models():
    """Note the chunks when they are built."""
    from megatron.training import training

    original = training.setup_model_and_optimizer

    def setup(*args, **kwargs):
        built = original(*args, **kwargs)
        MODELS.extend(built[0])
        return built

    training.setup_model_and_optimizer = setup


if DUMP:
    remember_models()
    dump_steps(Path(DUMP))
pretrain_gpt.main()
