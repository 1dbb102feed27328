"""A rank of a job: every supported family's losses on these ranks, against transformers'.

Arguments: folder, tensor-, pipeline- and expert-parallel size.
"""

import sys
from pathlib import Path

from tests.megatron_plugin import cpu_shim  # noqa: F401  before anything of megatron

# isort: split

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoModelForCausalLM

from megatron_plugin.bridge import TeacherRows
from megatron_plugin.models.weight_sources import open_weights
from megatron_plugin.teacher.model import Teacher
from pipeline.models.probe import UntrainedTeacherError, require_trained
from tests.megatron_plugin.reference_step import document_losses

SEQ_LENGTH = 48
BOUNDS = [[0, 20, 48, 48], [0, 1, 30, 48], [0, 48, 48, 48], [0, 7, 9, 48]]


def expected_losses(folder, rows):
    """Return transformers' losses, each document by itself; NaN for its first token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ahead = document_losses(model, rows.input_ids, rows.input_ids.roll(-1, 1), rows.cu_seqlens)
    losses = ahead.roll(1, 1)
    for row, bounds in zip(losses, BOUNDS, strict=True):
        row[[start for start in bounds if start < SEQ_LENGTH]] = torch.nan
    return losses


@torch.no_grad()
def main():
    """Compare, and say how far the worst loss is off."""
    folder, (tensor, pipeline, expert) = Path(sys.argv[1]), map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
    model_parallel_cuda_manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 300, (4, SEQ_LENGTH), generator=generator, dtype=torch.int32)
    rows = TeacherRows(tokens, torch.tensor(BOUNDS, dtype=torch.int32))
    for family in sorted(path for path in folder.iterdir()):
        weights = open_weights(str(family))
        shape = weights.shape
        teacher = Teacher(
            weights,
            torch.float32,
            seq_length=SEQ_LENGTH,
            micro_batch_size=2,
            device=torch.device("cpu"),
        )
        answer = teacher.score(rows)
        scores = None if answer is None else answer.losses
        mean = teacher.mean_loss(tokens[0, :30].tolist())
        # Only the last stage knows the losses; these weights are random.
        assert (mean is None) == (scores is None)
        if scores is not None:
            with pytest.raises(UntrainedTeacherError):
                require_trained(mean, shape.vocab_size)
            expected = expected_losses(family, rows)
            torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5, equal_nan=True)
            print(f"{family.name} {float((scores - expected).nan_to_num().abs().max()):.1e}")
    dist.barrier()
    dist.destroy_process_group()
