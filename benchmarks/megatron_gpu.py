"""Parts of megatron_gpu.sh: random models of real shapes, the machine's matmul rate, the table."""

import argparse
import json
import re
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from pipeline.dataset.reading import read_manifest

ROWS_PER_STEP, SEQ_LENGTH = 64, 2048
# Each run's ranks, and whether a teacher works in it.
RUNS = {
    "plain": (1, False),
    "random": (1, False),
    "cached": (1, False),
    "colocated": (1, True),
    "two_worlds": (2, True),
    "tensor": (2, False),
    "sequence": (2, False),
    "context": (2, False),
    "engine": (1, False),
}
WARM_STEPS = 3


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
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
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
    """Print a Markdown table of all runs that left a log."""
    machine = json.loads((work / "matmul.json").read_text())
    manifest = read_manifest(str(work / "aligned"))
    sizes = {name: _num_weights(work / name) for name in ("student", "teacher")}
    ratio = manifest.totals["num_teacher_tokens"] / manifest.totals["num_student_tokens"]
    tokens = ROWS_PER_STEP * SEQ_LENGTH
    training, scoring = 6 * sizes["student"] * tokens, 2 * sizes["teacher"] * tokens * ratio
    print(f"{machine['gpu']}, measured bf16 matmul rate {machine['flops'] / 1e12:.0f} TFLOP/s\n")
    print("| run | GPUs | s/step | student tokens/s | share of their matmul rate | peak GiB |")
    print("|---|---|---|---|---|---|")
    for run, (ranks, has_teacher) in RUNS.items():
        if not (work / f"{run}.log").exists():
            continue
        log = (work / f"{run}.log").read_text()
        times = [float(value) for value in re.findall(r"per iteration \(ms\): ([\d.]+)", log)]
        seconds = sorted(times[WARM_STEPS:])[len(times[WARM_STEPS:]) // 2] / 1000
        peaks = [float(value) for value in re.findall(r"max allocated: ([\d.]+)", log)]
        work_done = training + (scoring if has_teacher else 0)
        used = min(ranks, gpus)
        share = work_done / seconds / machine["flops"] / used
        print(
            f"| {run} | {used} | {seconds:.2f} | {tokens / seconds:,.0f} | {share:.0%} "
            f"| {max(peaks) / 1024:.0f} |"
        )


def _num_weights(folder: Path) -> int:
    """Return the weights that take part in products: all but the embedding's look-up."""
    config = json.loads((folder / "config.json").read_text())
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2
    embedding: int = config["vocab_size"] * config["hidden_size"]
    return total - embedding


def main() -> None:
    """Run one part."""
    parts = {"models": make_models, "matmul": measure_matmul}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=(*parts, "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--gpus", type=int, default=1, help="that the runs had (default: 1)")
    options = parser.parse_args()
    if options.part == "table":
        print_table(options.work, options.gpus)
    else:
        parts[options.part](options.work)


if __name__ == "__main__":
    main()
