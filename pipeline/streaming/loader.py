"""Batches from worker processes through reused shared memory.

DataLoader passes each batch in new shared memory, whose page faults cost several times as much as
reading the rows. Here workers fill a ring of slots.
"""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # untyped
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.command_line.failures import first_line
from pipeline.packing.order import ReplicaBatches
from pipeline.streaming.batch import Rows
from pipeline.streaming.rows import AlignedRows

_PREFETCHED_BATCHES = 2
"""Per worker, as DataLoader's own default."""


def load_batches(
    rows: AlignedRows,
    *,
    micro_batch_size: int,
    replica: int = 0,
    num_replicas: int = 1,
    consumed_samples: int = 0,
    num_samples: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> "RowLoader":
    """Return one replica's micro-batches, from a run's position.

    Args:
        rows: of a dataset or a mixture.
        micro_batch_size: rows per batch.
        replica: this data-parallel replica's number.
        num_replicas: may differ from the run's earlier part.
        consumed_samples: from the rows' `restore`.
        num_samples: of the whole run; None: all.
        num_workers: processes that read ahead; 0 reads in this one.
        pin_memory: whether batches lie in page-locked memory.

    Raises:
        ValueError: sizes don't divide each other, or the run has fewer rows.

    Example:
        >>> for batch in load_batches(rows, micro_batch_size=4):
        ...     loss = step(batch.to("cuda"))
    """
    if num_workers < 0:
        raise ValueError(f"num_workers {num_workers} is below 0")
    num_samples = len(rows) if num_samples is None else num_samples
    if num_samples > len(rows):
        raise ValueError(
            f"num_samples {num_samples} is more than the {len(rows)} rows of the run: raise "
            "num_epochs or, of a mixture, max_epochs in its file"
        )
    if consumed_samples > num_samples:
        raise ValueError(
            f"consumed_samples {consumed_samples} is more than the {num_samples} rows of the run"
        )
    batches = ReplicaBatches(
        num_samples=num_samples,
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        global_batch_size=rows.config.global_batch_size,
        replica=replica,
        num_replicas=num_replicas,
    )
    return RowLoader(rows, batches, num_workers, pin_memory)


@dataclass(frozen=True)
class RowLoader:
    """Batches, read in this process or by workers; see `load_batches`."""

    rows: AlignedRows
    batches: ReplicaBatches
    num_workers: int
    pin_memory: bool

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Rows]:
        """Yield the batches in order; each stays valid."""
        return self._from_workers() if self.num_workers else self._from_here()

    def _from_here(self) -> Iterator[Rows]:
        for samples in self.batches:
            buffer = self._new_buffer()
            self.rows.read_into(buffer, samples)
            yield Rows(buffer, self.rows.layout)

    def _from_workers(self) -> Iterator[Rows]:
        """Start the workers at once, so they read before the first request."""
        # A slot is filled anew only after the reader asked for the batch that follows: DataLoader
        # keeps this many batches under way, and hands out the next one before it returns a batch.
        num_slots = self.num_workers * _PREFETCHED_BATCHES + 1
        slots = torch.stack([self._new_buffer() for _ in range(num_slots)])
        try:
            slots.share_memory_()
        except RuntimeError as error:
            raise ValueError(
                f"workers that read ahead share {slots.nbytes:,} bytes, for which there is "
                f"no room in /dev/shm ({first_line(error)}): enlarge it (docker run --shm-size=1g),"
                " or let none read ahead (vocag train --workers 0)"
            ) from error
        loader: DataLoader[int | Exception] = DataLoader(
            _SlotFiller(self.rows, slots),
            batch_size=None,
            sampler=((n % num_slots, samples) for n, samples in enumerate(self.batches)),
            num_workers=self.num_workers,
            prefetch_factor=_PREFETCHED_BATCHES,
            worker_init_fn=_leave_trainer,
            # A fork server, Python 3.14's default, would stay in the trainer's process group, and
            # workers end with the process that started them.
            multiprocessing_context="fork",
            # Else each loader takes a seed from the run's own generator, and a resumed run
            # has made one draw more than one that never stopped.
            generator=torch.Generator(),
        )
        return self._copied(iter(loader), slots)

    def _copied(self, filled: Iterator[int | Exception], slots: torch.Tensor) -> Iterator[Rows]:
        for slot in filled:
            if isinstance(slot, Exception):
                raise slot
            buffer = self._new_buffer()
            # By numpy: torch wakes its threads for a copy, and they compete with the workers.
            np.copyto(buffer.numpy(), slots[slot].numpy())
            yield Rows(buffer, self.rows.layout)

    def _new_buffer(self) -> torch.Tensor:
        shape = (self.batches.micro_batch_size, self.rows.layout.num_words)
        return torch.empty(shape, dtype=torch.int32, pin_memory=self.pin_memory)


def _leave_trainer(_worker: int) -> None:
    """Protect a worker from signals to the trainer's process group; close the trainer's sockets.

    It ends with its trainer: DataLoader's own look comes seconds later, and until then the lock of
    a killed run's output, which is the worker's too, would refuse the next start.

    torchrun signals whole groups, but a trainer that saves still needs its readers, and ends them
    itself. Copies of its connections would outlive a killed trainer.
    """
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    with open(os.devnull) as nothing, suppress(FileNotFoundError):  # a system without /dev/fd
        for descriptor in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):  # of the listed folder itself, which is closed by now
                # What a worker logs may go to a socket.
                if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    # If closed, its number could go to a new file, which the old owner might close.
                    os.dup2(nothing.fileno(), descriptor, inheritable=False)


def _end_with_trainer() -> None:
    if (trainer := parent_process()) is not None:
        trainer.join()
        os._exit(1)


@dataclass(frozen=True, eq=False)
class _SlotFiller(Dataset[int | Exception]):
    rows: AlignedRows
    slots: torch.Tensor

    def __getitem__(self, work: tuple[int, list[int]]) -> Any:
        """Fill a slot and return its number, or an error, which DataLoader would rewrite."""
        slot, samples = work
        try:
            self.rows.read_into(self.slots[slot], samples)
        except (ValueError, OSError) as error:
            try:  # as the queue does it
                ForkingPickler.loads(ForkingPickler.dumps(error))
            except Exception:  # a type of a store's client
                raise error from None
            return ExceptionWithTraceback(error, error.__traceback__)
        return slot
