"""Which ranks hold one copy of a teacher together, and which of its rows each of them scores.

Expert-parallel ranks share the experts and each have the rest of the layers. They score different
rows at the same time, in step: every layer of experts is a collective of all of them. So they are
one replica, which shares out a request's rows.
"""

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_plugin.bridge import TeacherRows
from megatron_plugin.upstream import parallel_state


def replica_ranks() -> list[int]:
    """Return the ranks that hold this rank's copy together, ascending; the last has the losses."""
    group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return dist.get_process_group_ranks(group)


def replica_index() -> int:
    """Return the number of this rank's copy."""
    index: int = parallel_state.get_data_parallel_rank() // _num_expert_ranks()
    return index


def own_rows(rows: TeacherRows, micro_batch_size: int) -> TeacherRows:
    """Return what this expert-parallel rank scores of a replica's rows.

    Args:
        rows: whole micro-batches.
        micro_batch_size: of the model. Every rank gets as many: the last rows stand in for missing
            ones.
    """
    ranks = _num_expert_ranks()
    if ranks == 1:
        return rows
    missing = -len(rows) % (ranks * micro_batch_size)
    filled = torch.arange(len(rows) + missing).clamp_max(len(rows) - 1)
    together = TeacherRows(rows.input_ids[filled], rows.cu_seqlens[filled])
    return together.share(parallel_state.get_expert_model_parallel_rank(), ranks)


def all_rows(own: Tensor, num_rows: int) -> Tensor:
    """Return the values of a replica's rows, [num_rows, …], of what its ranks have scored."""
    if _num_expert_ranks() == 1:
        return own
    group = parallel_state.get_expert_model_parallel_group()
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own.contiguous(), group=group)
    return torch.cat(gathered)[:num_rows]


def _num_expert_ranks() -> int:
    size: int = parallel_state.get_expert_model_parallel_world_size()
    return size
