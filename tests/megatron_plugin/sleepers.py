"""Sleeping stand-ins for both models' passes, in the real schedules and over the real bridge."""

import time
from pathlib import Path

import torch

from megatron_plugin.student import run as student_run
from megatron_plugin.teacher.model import Teacher


class _Nap(torch.autograd.Function):
    """Passes a tensor on; sleeps on its way forward, and twice as long on its gradient's way."""

    @staticmethod
    def forward(context, tensor, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds)
        return gradient, None


def sleep_instead(student, teacher, spans):
    """Let each stage of either model sleep for each of its micro-batches.

    Args:
        student: seconds of a micro-batch forwards and backwards.
        teacher: seconds of a micro-batch.
        spans: folder for the seconds that each of the teacher's passes takes, a line each.
    """
    run, forward, score = student_run.run_forward_step, Teacher._forward_step, Teacher.score

    def run_and_sleep(*given):
        output, loss = run(*given)
        return _Nap.apply(output, student / 3), loss

    def forward_and_sleep(self, *given):
        found = forward(self, *given)
        time.sleep(teacher)
        return found

    def score_and_note(self, rows):
        start = time.perf_counter()
        reply = score(self, rows)
        with (Path(spans) / str(torch.distributed.get_rank())).open("a") as file:
            file.write(f"{time.perf_counter() - start}\n")
        return reply

    student_run.run_forward_step = run_and_sleep
    Teacher._forward_step, Teacher.score = forward_and_sleep, score_and_note
