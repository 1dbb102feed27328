"""A teacher on the student's own ranks: it scores a step before the student computes it.

Both models use the same process groups. With pipeline parallelism the teacher's pass must not mix
with the student's messages between stages, so it runs as a whole before the student's schedule
starts.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace

import torch

from megatron_plugin import checks
from megatron_plugin.arguments import VocagOptions
from megatron_plugin.student.batch import MicroBatch, guide, teacher_rows
from megatron_plugin.student.step_schedule import read_steps_ahead
from megatron_plugin.teacher.model import Teacher
from megatron_plugin.teacher.setup import load_teacher
from schemas.manifest import Manifest


class ColocatedTeacher:
    """Scores each step's micro-batches in one forward-only pass over the student's ranks."""

    def __init__(self, manifest: Manifest, options: VocagOptions, args: Namespace) -> None:
        """Load the teacher and wrap the schedules of training and validation."""
        self._how = options.aggregation
        self._teacher: Teacher = load_teacher(
            options.teacher,
            manifest,
            data=options.data,
            seq_length=checks.teacher_seq_length(options, manifest, args.seq_length),
            device=torch.device("cuda"),
            allow_untrained=options.allow_untrained_teacher,
        )
        read_steps_ahead(self._guide)

    def _guide(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        start = time.perf_counter()
        reply = self._teacher.score(teacher_rows(batches))
        if reply is None:
            return batches
        return guide(batches, replace(reply, waited_seconds=time.perf_counter() - start), self._how)
