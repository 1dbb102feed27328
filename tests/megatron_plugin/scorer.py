"""Run by torchrun: `megatron_plugin.score` on the CPU, as a user would start it."""

from tests.megatron_plugin import cpu_shim  # noqa: F401  before anything of megatron

# isort: split

import torch

from megatron_plugin import score

torch.set_num_threads(1)
score.main()
