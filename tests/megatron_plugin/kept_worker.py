"""A rank that says how many bytes a layer keeps of a token for its backward pass, in bf16."""

import sys

from tests.megatron_plugin import cpu_shim  # noqa: F401  before anything of megatron

# isort: split

import torch
from torch import distributed as dist

from megatron_plugin.models.attention import row_segments
from megatron_plugin.models.build import build_frozen_model
from megatron_plugin.models.weight_sources import open_weights
from megatron_plugin.upstream import model_parallel_cuda_manual_seed, parallel_state

PLACES = 256


def main():
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    for folder in sys.argv[1:]:
        print("kept", kept_bytes(open_weights(folder)) // PLACES)
    dist.destroy_process_group()


def kept_bytes(weights):
    """Return the bytes of all that a forward pass keeps, but for norms' fp32 copies."""
    model = build_frozen_model(weights, torch.bfloat16, device=torch.device("cpu"))
    model.requires_grad_(True).train()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.bias_activation_fusion = True  # as a student's is by default
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shape, kept = weights.shape, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        widths = (1, shape.hidden_size)
        is_of_norm = tensor.dtype == torch.float32 and tensor.shape[-1] in widths
        # Of rotary embeddings, one for all rows of a micro-batch.
        is_angle = storage.nbytes() == PLACES * 2 * shape.head_size
        is_counted = tensor.is_floating_point() and not (is_of_norm or is_angle)
        if is_counted and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other takes its address
        return tensor

    rows = torch.zeros(1, PLACES, dtype=torch.int64)
    segments = row_segments(torch.tensor([[0, PLACES]], dtype=torch.int32), PLACES, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(
            rows,
            torch.arange(PLACES).unsqueeze(0),
            None,
            packed_seq_params=segments,
            output_processor=lambda *, hidden_states, **_: hidden_states,
        )
    return sum(storage.nbytes() for storage in kept.values())


if __name__ == "__main__":
    main()
