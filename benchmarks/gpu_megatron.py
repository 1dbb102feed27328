"""Megatron's parts of benchmarks/gpu.py, next to what megatron_prediction.py says of them."""

import re
import shutil
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_results import note, run_and_print
from gpu_world import Scale

ROOT = Path(__file__).resolve().parents[1]
WARM_STEPS = 2
# Ranks, the teacher's model, and its ranks where it has a world of its own.
RUNS: dict[str, tuple[int, str, int]] = {
    "megatron_plain": (1, "", 0),
    "megatron_colocated": (1, "seven", 0),
    "megatron_two_worlds": (2, "tiny", 1),
}


def train_megatron(work: Path, scale: Scale, device: str, name: str) -> None:
    """Predict a run's step, make some, and note both."""
    if find_spec("megatron") is None:
        note(work, name, skipped="megatron-core is not installed")
        return
    ranks, argv = megatron_arguments(work, scale, name)
    predicted = predict_step(work, scale, name)
    note(work, name, predicted_seconds=round(predicted[0], 2), predicted=round(predicted[1], 1))
    if device != "cuda":
        note(work, name, skipped="Megatron's own code needs CUDA")
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "megatron_plugin.pretrain_gpt", *argv]
    status, told = run_and_print(command, cwd=ROOT)
    if status:
        sys.exit(status)
    seconds, peak = read_log(told)
    tokens = round(scale.global_batch_size * scale.seq_length / seconds)
    note(work, name, step=seconds, tokens_s=tokens, peak=round(peak, 1))


def megatron_arguments(work: Path, scale: Scale, name: str) -> tuple[int, list[str]]:
    """Return how many ranks a run has, and its command line."""
    ranks, teacher, own_ranks = RUNS[name]
    options = {
        "vocag-data": work / "aligned",
        "vocag-student": work / "student",
        "seq-length": scale.seq_length,
        "micro-batch-size": scale.micro_batch_size,
        "global-batch-size": scale.global_batch_size,
        "train-iters": scale.steps,
        "lr": 8e-5,
        "min-lr": 8e-6,
        "lr-decay-style": "cosine",
        "eval-iters": 0,
        "log-interval": 1,
        "num-workers": 2,
        "transformer-impl": "local",
    }
    options |= {"vocag-method": "teacher" if teacher else "full"}
    if teacher:
        options |= {"vocag-teacher": work / teacher}
        options |= {"vocag-teacher-micro-batch-size": scale.micro_batch_size}
    options |= {"vocag-teacher-world-size": own_ranks} if own_ranks else {}
    argv = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    argv += ["--bf16", "--calculate-per-token-loss"]
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):  # for torch to compile these with
        argv += ["--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"]
    return ranks, [*argv, *(["--vocag-allow-untrained-teacher"] if teacher else [])]


def predict_step(work: Path, scale: Scale, name: str) -> tuple[float, float]:
    """Return the seconds of a step and the GiB of a student's rank, by arithmetic."""
    from megatron_prediction import GPUS, Plan, predict

    from megatron_plugin.models.shape import read_shape

    teacher = RUNS[name][1]
    here = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    plan = Plan(
        "student",
        "teacher",
        gpu=next((known for known in GPUS if known in here), "h100"),
        # Two worlds on one GPU take turns, which is what colocated ones do.
        gpus=1,
        seq_length=scale.seq_length,
        micro_batch_size=scale.micro_batch_size,
        global_batch_size=scale.global_batch_size,
        teacher_micro_batch_size=scale.micro_batch_size,
        overhead_gib=0,  # the log's peak is of tensors alone
    )
    shape = read_shape(work / teacher) if teacher else None
    found = predict(plan, read_shape(work / "student"), shape)
    return found.step_seconds, found.student_gib


def read_log(log: str) -> tuple[float, float]:
    """Return the median seconds of a step, and the most GiB that a rank held."""
    times = [float(value) for value in re.findall(r"per iteration \(ms\): ([\d.]+)", log)]
    warm = times[WARM_STEPS:]
    if not warm:
        sys.exit(f"the log tells of {len(times)} steps, and the first {WARM_STEPS} don't count")
    peaks = [float(value) for value in re.findall(r"max allocated: ([\d.]+)", log)]
    return statistics.median(warm) / 1000, max(peaks, default=0.0) / 1024
