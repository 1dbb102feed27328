"""A rank of a job: every supported family on these ranks, against transformers.

The losses agree, and what all ranks hold together is bit for bit what was loaded.

Arguments: folder, tensor-, pipeline- and expert-parallel size.
"""

import sys
from itertools import pairwise
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
from megatron_plugin.models.weight_rules import merge_weights, whole_model_names
from megatron_plugin.models.weights import open_weights
from megatron_plugin.teacher.model import Teacher
from pipeline.models.probe import UntrainedTeacherError, require_trained

SEQ_LENGTH = 48
BOUNDS = [[0, 20, 48, 48], [0, 1, 30, 48], [0, 48, 48, 48], [0, 7, 9, 48]]


def expected_losses(folder, rows):
    """Return transformers' losses, each document by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = torch.full(rows.input_ids.shape, torch.nan)
    for row, bounds in enumerate(BOUNDS):
        for start, stop in pairwise(bounds):
            if stop - start < 2:
                continue
            tokens = rows.input_ids[row : row + 1, start:stop].long()
            logits = model(tokens).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            losses[row, start + 1 : stop] = each
    return losses


def require_round_trip(teacher, weights):
    """Merge every rank's slices into Hugging Face tensors again."""
    own = (parallel_state.get_tensor_model_parallel_rank(), whole_model_names(teacher._model))
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    slices = {}
    for tensor_rank, named in parts:
        for name, parameter in named.items():
            slices.setdefault(name, {})[tensor_rank] = parameter.data
    ordered = {name: [found[rank] for rank in sorted(found)] for name, found in slices.items()}
    merged = merge_weights(ordered, weights.shape)
    # A tied output layer's weight is the embedding's, and isn't in the files.
    assert merged.keys() == weights.tensors.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, weights.open(name)[:]), name


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
        require_round_trip(teacher, weights)
        scores = teacher.score(rows)
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
