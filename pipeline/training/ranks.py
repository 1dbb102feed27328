"""The processes of a data-parallel run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.command_line.termination import Terminated
from pipeline.models.devices import find_device
from pipeline.training.stopping import RunStoppedError

# A rank may wait while another downloads a model.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Ranks:
    """This process in its run: its device, number from 0, and the number of processes."""

    device: torch.device
    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the log, checkpoints and models."""
        return self.number == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All processes; None for a single one."""
        return dist.group.WORLD if self.count > 1 else None

    def add_up(self, values: Tensor) -> Tensor:
        """Sum a tensor over the processes; all must call."""
        values = values.to(self.device)
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether a flag is set in any process; all must call."""
        return flag if self.count == 1 else bool(self.add_up(torch.tensor(float(flag))) > 0)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let the first process run a block before the others."""
        if self.count > 1 and not self.is_first:
            dist.barrier()
        yield
        if self.count > 1 and self.is_first:
            dist.barrier()


@contextmanager
def joined_ranks(device: str) -> Iterator[Ranks]:
    """Join the other processes if torchrun started this one; leave them at the end.

    `device` "" is the GPU, if any, under torchrun that of the local number. ValueError if it is
    invalid or shared, or another process ends while this one waits for it.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    place = find_device(device)
    if count == 1:
        yield Ranks(place)
        return
    if place.type == "cuda":
        if place.index is not None:
            raise ValueError(
                f"device={device} would be shared by {count} processes: leave it out under "
                "torchrun, each process takes the GPU of its number"
            )
        place = torch.device("cuda", _own_gpu(count))
        torch.cuda.set_device(place)
    on_gpu = place.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=_TIMEOUT, device_id=place if on_gpu else None
    )
    leaves = True
    try:
        yield Ranks(place, dist.get_rank(), count)
    except RunStoppedError:  # of all processes, after one step
        raise
    except (Exception, KeyboardInterrupt, Terminated) as error:
        # NCCL would wait for the others, which wait for this process: its exit ends them all.
        leaves = not on_gpu
        if "gloo/transport" in str(error):
            raise ValueError("another process has ended; its message says why") from error
        raise
    finally:
        if leaves:
            dist.destroy_process_group()


def _own_gpu(count: int) -> int:
    """Return the number of this process's GPU, which torchrun tells."""
    told, there = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    if told is None:
        raise ValueError(
            f"WORLD_SIZE is {count}, but LOCAL_RANK isn't set, which says which of this machine's "
            f"{there} GPUs is this process's: start with torchrun, or unset WORLD_SIZE for one "
            "process"
        )
    if int(told) >= there:
        raise ValueError(
            f"LOCAL_RANK is {told}, but torch sees {there} GPUs here, and each process needs its "
            "own: start no more processes on a machine than it has GPUs (torchrun "
            f"--nproc-per-node {there}), and let each see all of them (CUDA_VISIBLE_DEVICES)"
        )
    return int(told)
