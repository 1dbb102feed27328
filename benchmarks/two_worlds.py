"""Does the student ever wait? Sleeping stand-ins for both models in the real schedules and bridge.

    python -m benchmarks.two_worlds [--layouts 1x4 2x8 4x8] [--student-ms 3000] [--teacher 0.95]

A layout is the pipeline stages of either model, and a step's micro-batches. Each stage of the
student sleeps for each micro-batch, a third of it forwards; each stage of the teacher sleeps, too.
All else is real: Megatron's trainer and its schedules, tiny models, the dataset, the bridge, one
process for each rank, without a GPU. A step is compared with the slower side: the same student
without a teacher, or the teacher's own pass, both measured. Other work on the machine wakes
sleepers late, never early: passes are long so that it shows little, and what is compared is the
time that three quarters of the steps exceed; medians and the load stand beside.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.megatron_plugin.models import save_model
from tests.megatron_plugin.training_job import Inputs, train_forked
from tests.support.datasets import build_dataset, make_texts

ROWS = 16
"""Of a step."""
TEACHER_MICRO_BATCHES = 8
MOST = 1.05
"""Times the slower side's time that a step may take."""
FIRST, LAST = 3, 2
"""Steps left out at both ends: nothing is asked ahead of the first ones, or behind the last."""


@dataclass(frozen=True)
class Layout:
    """Pipeline stages of either model, and the student's micro-batches of a step."""

    stages: int
    micro_batches: int

    def fill(self, micro_batches: int) -> float:
        """Return a pass's time, as a multiple of one stage's work on all micro-batches."""
        return (micro_batches + self.stages - 1) / micro_batches


def main() -> None:
    """Measure all layouts; a missed aim is the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=["1x1", "1x4", "2x4", "2x8", "4x8", "4x16"])
    parser.add_argument("--student-ms", type=float, default=3000, help="of a whole step")
    parser.add_argument("--teacher", type=float, default=0.95, help="its pass, of the step's time")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    print("stages micro-batches  student  teacher  both  ratio  of medians  waited  load")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder))
        for name in options.layouts:
            layout = Layout(*map(int, name.split("x")))
            missed += not measure(layout, inputs, options, Path(folder) / name)
    if missed:
        raise SystemExit(f"{missed} layouts take more than {MOST:g} x the slower side's time")


def make_inputs(folder: Path) -> Inputs:
    """Write a dataset, and two models of four layers."""
    build_dataset(folder / "data", make_texts(80), num_shards=2)
    for name, vocab_size in (("student", 400), ("teacher", 480)):
        save_model(folder / name, "llama", vocab_size=vocab_size, num_hidden_layers=4)
    return Inputs(folder / "data", folder / "data", folder / "student", folder / "teacher")


def measure(layout: Layout, inputs: Inputs, options: argparse.Namespace, folder: Path) -> bool:
    """Print a layout's line; return whether it meets the aim."""
    folder.mkdir()
    step = options.student_ms / 1000
    sleeps = {
        "student": step / layout.fill(layout.micro_batches) / layout.micro_batches,
        "teacher": options.teacher * step
        / layout.fill(TEACHER_MICRO_BATCHES) / TEACHER_MICRO_BATCHES,
        "spans": str(folder),
    }  # fmt: skip
    common = {
        "environment": {"VOCAG_TEST_SLEEP": json.dumps(sleeps)},
        "pipeline_model_parallel_size": layout.stages,
        "micro_batch_size": ROWS // layout.micro_batches,
        "global_batch_size": ROWS,
        "train_iters": options.steps,
    }
    alone, _ = steps(train_forked(inputs, layout.stages, vocag_teacher=None, **common).stdout)
    together = train_forked(
        inputs,
        2 * layout.stages,
        vocag_teacher_world_size=layout.stages,
        vocag_teacher_pipeline_model_parallel_size=layout.stages,
        vocag_teacher_micro_batch_size=ROWS // TEACHER_MICRO_BATCHES,
        **common,
    )
    both, waited = steps(together.stdout)
    passes = [path.read_text().split() for path in folder.iterdir()]
    teacher = max(
        (Times.of([1000 * float(value) for value in each]) for each in passes),
        key=lambda times: times.median,
    )
    slower, medians = max(alone.quiet, teacher.quiet), max(alone.median, teacher.median)
    ratio = both.quiet / slower
    print(f"{layout.stages:6} {layout.micro_batches:13} {alone.quiet:8.0f} {teacher.quiet:8.0f} "
          f"{both.quiet:5.0f} {ratio:6.3f} {both.median / medians:11.3f} {waited:7.0f} "
          f"{os.getloadavg()[0]:5.1f}", flush=True)  # fmt: skip
    return ratio <= MOST


@dataclass(frozen=True)
class Times:
    """Milliseconds of steps: their lower quartile and their median."""

    quiet: float
    median: float

    @classmethod
    def of(cls, values: list[float]) -> Times:
        """Leave out the first and the last steps."""
        steady = values[FIRST:-LAST]
        return cls(statistics.quantiles(steady, n=4)[0], statistics.median(steady))


def steps(output: str) -> tuple[Times, float]:
    """Return a job's steps, and the median milliseconds that one waited for a teacher."""
    times = re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", output)
    waits = re.findall(r"teacher_wait_ms: ([0-9.E+-]+)", output)
    waited = Times.of([float(wait) for wait in waits]).median if waits else 0.0
    return Times.of([float(time) for time in times]), waited


if __name__ == "__main__":
    main()
