"""A rank of a job: `megatron_plugin.score` on the CPU, as a user would start it."""

from tests.megatron_plugin import cpu_shim  # noqa: F401  before anything of megatron

# isort: split

import torch

from megatron_plugin import score


def main():
    """Score as the command line says."""
    torch.set_num_threads(1)
    score.main()
