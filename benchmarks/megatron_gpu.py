"""Parts of megatron_gpu.sh: random models of real shapes, the machine's matmul rate, the table.

    python benchmarks/megatron_gpu.py --predict --student S --teacher T --gpus 32 --gpu h100

needs no GPU: tokens per second, hours and memory per rank, by arithmetic.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron_prediction import GPUS, Plan, describe, predict
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from megatron_plugin.models.shape import read_shape
from pipeline.command_line.options import parse_options
from pipeline.dataset.reading import read_manifest

ROWS_PER_STEP, SEQ_LENGTH, MICRO_BATCH = 64, 2048, 4
WARM_STEPS = 3
COLUMNS = ["run", "GPUs", "s/step", "predicted", "student tokens/s"]
COLUMNS += ["share of their matmul rate", "peak GiB", "predicted"]


def runs(gpus: int) -> dict[str, tuple[int, bool, Mapping[str, Any] | None]]:
    """Return each run's ranks, whether a teacher works in it, and what its `Plan` adds if any."""
    every, half = (8, 4) if gpus >= 8 else (1, 1)
    return {
        "plain": (1, False, {}),
        "resumed": (1, False, {}),
        "colocated": (every, True, {}),
        "two_worlds": (2 * half, True, {"teacher_gpus": half} if gpus >= 2 * half else None),
        "random": (1, False, {}),
        "tensor": (2, False, {"tensor_parallel": 2}),
        "sequence": (2, False, None),
        "context": (2, False, None),
        "engine": (1, False, {"distributed_optimizer": True}),
        "cached": (1, False, {}),
    }


def make_models(work: Path) -> None:
    """Write a TinyLlama-1.1B and a Mistral-7B, random, with the dataset's vocabularies."""
    manifest = read_manifest(str(work / "aligned"))
    student = LlamaConfig(
        vocab_size=manifest.student.vocab_size,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    teacher = MistralConfig(
        vocab_size=manifest.teacher.vocab_size, num_key_value_heads=8, sliding_window=None
    )
    for name, config in (("student", student), ("teacher", teacher)):
        if not (work / name / "config.json").exists():
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, trust_remote_code=False
            )
            model.save_pretrained(work / name)


def measure_matmul(work: Path, size: int = 8192, repeats: int = 50) -> None:
    """Write the rate of large bf16 products, in FLOP/s."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        left @ right
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        left @ right
    torch.cuda.synchronize()
    rate = 2 * size**3 * repeats / (time.perf_counter() - start)
    (work / "matmul.json").write_text(
        json.dumps({"flops": rate, "gpu": torch.cuda.get_device_name()})
    )


def print_table(work: Path, gpus: int) -> None:
    """Print a Markdown table of all runs that left a log, next to what was predicted."""
    machine = json.loads((work / "matmul.json").read_text())
    print(f"{machine['gpu']}, measured bf16 matmul rate {machine['flops'] / 1e12:.0f} TFLOP/s\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for row in table_rows(work, gpus, machine):
        print(f"| {' | '.join(row)} |")


def table_rows(work: Path, gpus: int, machine: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the table's cells.

    Args:
        work: holds the logs.
        gpus: that the runs had.
        machine: `flops` measured, and the `gpu`'s name.
    """
    manifest = read_manifest(str(work / "aligned"))
    ratio = manifest.totals["num_teacher_tokens"] / manifest.totals["num_student_tokens"]
    student, teacher = (read_shape(work / name) for name in ("student", "teacher"))
    tokens = ROWS_PER_STEP * SEQ_LENGTH
    for run, (ranks, has_teacher, added) in runs(gpus).items():
        if not (work / f"{run}.log").exists():
            continue
        seconds, peak = _measured((work / f"{run}.log").read_text())
        done = 6 * student.weights_per_token * tokens
        done += 2 * teacher.weights_per_token * tokens * ratio if has_teacher else 0
        used = min(ranks, gpus)
        predicted_seconds = predicted_peak = "–"
        name = next((name for name in GPUS if name in machine["gpu"].lower()), None)
        if name is not None and added is not None:
            plan = Plan(
                "student",
                "teacher",
                gpu=name,
                gpus=used,
                micro_batch_size=MICRO_BATCH,
                global_batch_size=ROWS_PER_STEP,
                teacher_micro_batch_size=MICRO_BATCH,
                teacher_tokens=ratio,
                overhead_gib=0,  # the log's peak is of tensors alone
                **added,
            )
            found = predict(plan, student, teacher if has_teacher else None)
            predicted_seconds = f"{found.step_seconds:.2f}"
            predicted_peak = f"{found.student_gib:.0f}"
        share = done / seconds / machine["flops"] / used
        speed = (f"{tokens / seconds:,.0f}", f"{share:.0%}")
        memory = (f"{peak:.0f}", predicted_peak)
        yield (run, str(used), f"{seconds:.2f}", predicted_seconds, *speed, *memory)


def _measured(log: str) -> tuple[float, float]:
    """Return the median seconds of a step, and the most GiB that a student's rank held."""
    times = [float(value) for value in re.findall(r"per iteration \(ms\): ([\d.]+)", log)]
    warm = sorted(times[WARM_STEPS:])
    peaks = [float(value) for value in re.findall(r"max allocated: ([\d.]+)", log)]
    return warm[len(warm) // 2] / 1000, max(peaks) / 1024


def main() -> None:
    """Run one part, or predict."""
    if "--predict" in sys.argv:
        given = [argument for argument in sys.argv[1:] if argument != "--predict"]
        print(describe(parse_options(Plan, given, prog="megatron_gpu.py --predict")))
        return
    parts = {"models": make_models, "matmul": measure_matmul}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=(*parts, "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the runs had (default: 1)")
    options = parser.parse_args()
    if options.part == "table":
        print_table(options.work, options.gpus)
    else:
        parts[options.part](options.work)


if __name__ == "__main__":
    main()
