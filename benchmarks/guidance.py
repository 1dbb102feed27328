"""What the losses cost: cross entropy against the plain path, guidance against a student's step.

    python benchmarks/guidance.py [--device cuda]
        [--only scoring training aggregation overhead distill]

Every cross entropy runs in its own process, so that its peak memory is its own; rivals take turns
and the best round counts. Trust the ratios; on a CPU, those of the CPU seconds, which other work on
the machine hardly changes. The exit code is 1 where a target is missed.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measure import Report
from torch import Tensor

from pipeline.guidance import aggregate_teacher_losses, guided_loss, select_tokens
from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.divergences import LabelDistributions, distilled_loss
from schemas.distribution_rule import EntryShape
from tests.support.largest_tensor import LargestTensor

KEEP_FRACTION = 0.4
# Of scoring in chunks: its time by the plain path's, and its peak memory in percent of that path's.
# Of guidance: percent of a student's step.
MOST_TIME = {"cpu": 1.3, "cuda": 1.1}
MOST_MEMORY = 12.5
MOST_OF_A_STEP = {"cpu": 5.0, "cuda": 2.0}
# A step that learns K entries of a distribution a label, by a step that learns labels alone; so
# many tokens are in cells of several, of which the largest has a fifth, as real pairs have.
SHAPE, WEIGHT, IN_CELLS = EntryShape(9, 4), 0.8, 5000
MOST_OF_A_PLAIN_STEP = 1.15


def main() -> None:
    """Run the benchmarks that are asked for."""
    parts = {
        "scoring": scoring,
        "training": training,
        "aggregation": aggregation,
        "overhead": overhead,
        "distill": distill,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--student-size", type=int, default=192, help="hidden size, distill only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.measure:
        print(json.dumps(measure(options, *options.measure)))
        return
    report = Report()
    for name in options.only:
        print(f"\n{name}")
        parts[name](options, report)
    sys.exit(1 if report.missed else 0)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels).losses


def torch_own(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="none", options=options)


RIVALS = {"plain": plain, "chunked": chunked, "torch_own": torch_own}


def scoring(options: argparse.Namespace, report: Report) -> None:
    """Compare per-token losses without a gradient."""
    clock = "cpu_seconds" if options.device == "cpu" else "seconds"
    for dtype, best in compare(options, "scoring").items():
        if not {"plain", "chunked"} <= best.keys():
            continue
        plain, chunked = best["plain"], best["chunked"]
        report.check(
            f"time of scoring in chunks, {dtype}",
            chunked[clock] / plain[clock],
            most=MOST_TIME[options.device],
        )
        report.check(
            f"memory of scoring in chunks, {dtype}",
            100 * chunked["peak_bytes"] / plain["peak_bytes"],
            most=MOST_MEMORY,
            unit="%",
        )


def training(options: argparse.Namespace, report: Report) -> None:
    """Compare losses and gradients when every token, and when 40 % of them, are kept."""
    compare(options, "training_full")
    compare(options, "training_kept")


def compare(options: argparse.Namespace, task: str) -> dict[str, dict[str, dict[str, float]]]:
    """Measure the rivals in turn; print and return the best of each by dtype."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in options.dtype:
        best = results.setdefault(dtype, {})
        for _ in range(options.rounds):
            for rival in options.rivals:
                result = measure_in_child(options, task, rival, dtype)
                known = best.setdefault(rival, result)
                best[rival] = {key: min(known[key], result[key]) for key in result}
        for rival, result in best.items():
            reference = best[options.rivals[0]]
            print(
                f"  {task:13} {dtype:8} {rival:9} {result['seconds']:7.2f} s "
                f"({result['seconds'] / reference['seconds']:5.2f} x) "
                f"CPU {result['cpu_seconds']:7.2f} s "
                f"({result['cpu_seconds'] / reference['cpu_seconds']:5.2f} x) "
                f"peak {result['peak_bytes'] / 2**20:6.0f} MiB "
                f"({result['peak_bytes'] / reference['peak_bytes']:.3f} x)",
                flush=True,
            )
    return results


def measure_in_child(
    options: argparse.Namespace, task: str, rival: str, dtype: str
) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", task, rival]
    for name in ("device", "tokens", "vocab_size", "hidden_size", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    output = subprocess.run([*command, "--dtype", dtype], check=True, capture_output=True).stdout
    measured: dict[str, float] = json.loads(output)
    return measured


def measure(options: argparse.Namespace, task: str, rival: str) -> dict[str, float]:
    dtype, device = getattr(torch, options.dtype[0]), options.device
    hidden = torch.randn(options.tokens, options.hidden_size).to(device, dtype).requires_grad_()
    weight = torch.randn(options.vocab_size, options.hidden_size).to(device, dtype).requires_grad_()
    labels = torch.randint(options.vocab_size, (options.tokens,)).to(device)
    fraction = KEEP_FRACTION if task == "training_kept" else 1.0
    kept = (torch.rand(options.tokens) < fraction).to(device)

    def run() -> None:
        with torch.set_grad_enabled(task != "scoring"):
            losses = RIVALS[rival](hidden, weight, labels)
            if task != "scoring":
                torch.autograd.grad((losses.float() * kept).sum(), (hidden, weight))
        synchronise(device)

    RIVALS[rival](hidden[:16], weight[:256], labels[:16] % 256).sum().backward()  # loads libraries
    held = reset_peak_bytes(device)
    seconds, cpu_seconds = best_times(run, 2)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak_bytes(device) - held,
    }


def aggregation(options: argparse.Namespace, report: Report) -> None:
    """Compare ways to take the maximum of each span: narrow as aligned, wide as chunks."""
    rows, length = 8, 2048
    losses = torch.rand(rows, length).to(options.device)
    starts = torch.arange(length).expand(rows, -1)
    narrow = torch.where(torch.rand(rows, length) < 0.8, 1, torch.randint(0, 6, (rows, length)))
    widths = {"narrow": narrow, "wide": torch.full((rows, length), 256)}
    for name, width in widths.items():
        spans = torch.stack((starts, (starts + width).clamp_max(length)), -1).to(options.device)
        for rival in (aggregate_teacher_losses, by_segment_reduce, by_scatter_reduce):
            assert torch.equal(
                rival(losses, spans).nan_to_num(-1),
                aggregate_teacher_losses(losses, spans).nan_to_num(-1),
            )
            seconds, _ = best_times(partial(rival, losses, spans), options.rounds * 5)
            print(f"  max over {name:6} spans {rival.__name__:25} {seconds * 1e3:8.2f} ms")


def by_segment_reduce(losses: Tensor, spans: Tensor) -> Tensor:
    values, widths, _ = concatenated(losses, spans)
    maxima = torch.segment_reduce(values, "max", lengths=widths, initial=-torch.inf)
    return maxima.view(spans.shape[:2]).masked_fill(widths.view(spans.shape[:2]) == 0, torch.nan)


def by_scatter_reduce(losses: Tensor, spans: Tensor) -> Tensor:
    values, widths, owners = concatenated(losses, spans)
    maxima = losses.new_full((widths.numel(),), -torch.inf)
    maxima.scatter_reduce_(0, owners, values, "amax")
    return maxima.view(spans.shape[:2]).masked_fill(widths.view(spans.shape[:2]) == 0, torch.nan)


def concatenated(losses: Tensor, spans: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(len(losses), device=losses.device)[:, None] * losses.shape[1]
    starts, ends = (spans + rows[..., None]).flatten(0, 1).unbind(-1)
    widths = ends - starts
    owners = torch.arange(len(widths), device=losses.device).repeat_interleave(widths)
    first = (widths.cumsum(0) - widths)[owners]
    index = starts[owners] + torch.arange(len(owners), device=losses.device) - first
    return losses.flatten()[index], widths, owners


def overhead(options: argparse.Namespace, report: Report) -> None:
    """Compare guidance on top of per-token losses with a small student's whole step."""
    rows, length = 2, 1024
    student = small_student(32_000, 192, options.device)
    head = student.embed_tokens.weight
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)  # as vocag train's
    input_ids = torch.randint(32_000, (rows, length), device=options.device)
    teacher = torch.rand(rows, length, device=options.device)
    starts = torch.arange(length, device=options.device).expand(rows, -1)
    spans = torch.stack((starts, (starts + 2).clamp_max(length)), -1)
    mask = torch.ones(rows, length, dtype=torch.bool, device=options.device)
    losses = torch.rand(rows, length, device=options.device, requires_grad=True)

    def guide(losses: Tensor) -> Tensor:
        guidance = aggregate_teacher_losses(teacher, spans, "max")
        result = guided_loss(losses, select_tokens(losses, guidance, loss_mask=mask))
        return result.loss_sum / result.num_tokens

    def step(loss_of: Callable[[Tensor], Tensor]) -> None:
        hidden = student(input_ids=input_ids).last_hidden_state
        loss_of(linear_cross_entropy(hidden, head, input_ids).losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronise(options.device)

    def guide_alone() -> None:
        guide(losses).backward()
        synchronise(options.device)

    step(torch.mean)
    contenders = {
        "step, every token kept": lambda: step(torch.mean),
        "step, guided": lambda: step(guide),
        "guidance alone": guide_alone,
    }
    seconds = best_in_turn(contenders, 2 * options.rounds, 0)
    print(f"  student of {millions(student):.1f} M parameters, {rows} rows of {length} tokens")
    whole = seconds["step, every token kept"]
    for name, value in seconds.items():
        print(f"  {name:23} {value * 1e3:8.1f} ms ({value / whole:7.2%} of a step)")
    share = 100 * seconds["guidance alone"] / whole
    report.check("guidance, of a step", share, most=MOST_OF_A_STEP[options.device], unit="%")


def distill(options: argparse.Namespace, report: Report) -> None:
    """Compare learning K entries a label with plain training: the loss alone, and a step."""
    length, device = options.tokens, options.device
    student = small_student(options.vocab_size, options.student_size, device)
    head = student.embed_tokens.weight
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)  # as vocag train's
    input_ids = torch.randint(options.vocab_size, (1, length), device=device)
    cells = some_cells(options.vocab_size)
    ids = torch.randint(options.vocab_size, (1, length, SHAPE.width), device=device)
    # Half of the entries are tokens of cells of several.
    ids = torch.where(torch.rand(ids.shape, device=device) < 0.5, ids % IN_CELLS, ids)
    probs = torch.rand(1, length, SHAPE.width, device=device).softmax(-1)
    known = LabelDistributions(ids, probs, input_ids, SHAPE, cells)
    mask = torch.ones(1, length, device=device)
    states = torch.randn(1, length, options.student_size, device=device, requires_grad=True)

    def full(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, head, input_ids).losses.mean()

    def distilled(hidden: Tensor) -> Tensor:
        asked = known.asked_of(input_ids)
        scores = linear_cross_entropy(hidden, head, input_ids, entry_ids=asked, cells=cells)
        found = distilled_loss(scores, known, input_ids, loss_mask=mask, weight=WEIGHT)
        mean: Tensor = found.loss_sum / length
        return mean

    def loss_alone(loss_of: Callable[[Tensor], Tensor]) -> None:
        torch.autograd.grad(loss_of(states), (states, head))
        synchronise(device)

    def step(loss_of: Callable[[Tensor], Tensor]) -> None:
        loss_of(student(input_ids=input_ids).last_hidden_state).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronise(device)

    print(
        f"  student of {millions(student):.1f} M parameters, V = {options.vocab_size:,}, "
        f"one row of {length} tokens, 8 entries and 4 draws, {IN_CELLS:,} tokens in cells, fp32"
    )
    for name, part in {"loss and its gradient": loss_alone, "step": step}.items():
        part(distilled)
        contenders = {f.__name__: partial(part, f) for f in (full, distilled)}
        seconds = best_in_turn(contenders, options.rounds, int(device == "cpu"))
        report.say(f"{name}, full", f"{seconds['full']:.2f} s (on a CPU, of all its cores)")
        ratio = seconds["distilled"] / seconds["full"]
        report.check(f"{name}, distilled", ratio, most=MOST_OF_A_PLAIN_STEP)
    with LargestTensor() as largest:
        loss_alone(distilled)
    # It is the output layer's gradient, which plain training has, too.
    share = 100 * largest.num_elements / (length * options.vocab_size)
    report.check("largest tensor by [tokens, V]", share, most=MOST_MEMORY, unit="%")


def some_cells(vocab_size: int) -> Cells:
    """Return cells of which one has a fifth of the tokens, the others four each."""
    numbers = np.arange(vocab_size)
    numbers[:IN_CELLS] -= numbers[:IN_CELLS] % 4
    numbers[: IN_CELLS // 5] = 0
    return Cells.of(numbers)


def small_student(vocab_size: int, hidden_size: int, device: str) -> Any:
    """Return the body of a random Llama of six layers."""
    from transformers import LlamaConfig, LlamaModel

    heads = hidden_size // 32
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=6,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    model: Any = LlamaModel(config)
    return model.to(device)


def millions(model: torch.nn.Module) -> float:
    """Return a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def best_in_turn(
    contenders: Mapping[str, Callable[[], object]], rounds: int, clock: int
) -> dict[str, float]:
    """Return each one's least seconds, of the wall clock (0) or of the CPU (1).

    In turn, so that other work on the machine slows all of them.
    """
    turns = [
        {name: best_times(run, 1)[clock] for name, run in contenders.items()} for _ in range(rounds)
    ]
    return {name: min(turn[name] for turn in turns) for name in contenders}


def best_times(run: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Run several times; return the least wall and the least CPU seconds."""
    times = []
    for _ in range(rounds):
        start, start_cpu = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - start, time.process_time() - start_cpu))
    wall, cpu = zip(*times, strict=True)
    return min(wall), min(cpu)


def reset_peak_bytes(device: str) -> int:
    """Start a new peak and give the bytes held now."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM := VmRSS
        return peak_bytes(device)
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_bytes(device: str) -> int:
    if device == "cpu":
        status = Path("/proc/self/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None, status
        return int(found[1]) * 1024
    return torch.cuda.max_memory_allocated()


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
