"""What packed rows cost a model's body, forward and backward, against a document at a time.

    python benchmarks/attention.py [--lengths 512 2048 4096] [--device cuda] [--dtype bfloat16]

Every way runs the same documents: each alone; packed under a boolean mask of T x T places; packed,
told positions and nothing else, by transformers' own "sdpa"; packed by
`pipeline.models.packed_attention`. They take turns and the best round counts. Trust the ratios; on
a CPU, those of the CPU seconds, which other work on the machine hardly changes. The exit code is 1
where a target is missed.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from measure import Report
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.models.hf_models import hidden_states
from pipeline.models.packed_check import keep_documents_apart

# Seconds of a document at a time by those of packed rows.
LEAST_SPEED = 0.9
MEAN_DOCUMENT, SPREAD = 300, 0.8  # tokens; of the logarithm


def main() -> None:
    """Measure every length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    report = Report()
    model = make_student().to(options.device, getattr(torch, options.dtype))
    for length in options.lengths:
        compare(model, length, options, report)
    sys.exit(1 if report.missed else 0)


def make_student() -> LlamaForCausalLM:
    """Return the demo's student."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=8192,
        )
    )


def compare(
    model: LlamaForCausalLM, length: int, options: argparse.Namespace, report: Report
) -> None:
    """Measure all ways over a row of documents."""
    lengths = document_lengths(length)
    input_ids = torch.randint(32_000, (1, length)).to(options.device)
    places = torch.cat([torch.arange(n) for n in lengths])[None].to(options.device)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = (segments[:, None] == segments).to(options.device)
    mask = same.tril()[None, None]

    def alone() -> Tensor:
        parts = input_ids.split(lengths, dim=1)
        states = [model.model(input_ids=ids, use_cache=False).last_hidden_state for ids in parts]
        return torch.cat(states, dim=1)

    def masked() -> Tensor:
        output = model.model(
            input_ids=input_ids, position_ids=places, attention_mask=mask, use_cache=False
        )
        states: Tensor = output.last_hidden_state
        return states

    def packed() -> Tensor:
        return hidden_states(model, input_ids, position_ids=places)

    ways: dict[str, tuple[str | None, Callable[[], Tensor]]] = {
        "a document at a time": ("sdpa", alone),
        "packed, boolean mask": ("sdpa", masked),
        "packed, transformers' sdpa": ("sdpa", packed),
        "packed, ours": (None, packed),
    }
    best: dict[str, tuple[float, float]] = {}
    for _ in range(options.rounds):
        for name, (attention, run) in ways.items():
            keep_documents_apart(model, attention)
            taken = time_step(model, run)
            best[name] = min(best.get(name, taken), taken)
    print(f"\nrow of {length} tokens, {len(lengths)} documents, {options.dtype}")
    wall, cpu = best["a document at a time"]
    for name, (seconds, cpu_seconds) in best.items():
        print(
            f"  {name:27} {length / seconds:8,.0f} tokens/s ({wall / seconds:4.2f} x), "
            f"CPU {cpu_seconds:6.2f} s ({cpu / cpu_seconds:4.2f} x)",
            flush=True,
        )
    ours = best["packed, ours"]
    speed = cpu / ours[1] if options.device == "cpu" else wall / ours[0]
    report.check(f"speed of packed rows, {length} tokens", speed, least=LEAST_SPEED)


def document_lengths(length: int) -> list[int]:
    """Return the lengths of documents that fill a row."""
    generator = torch.Generator().manual_seed(length)
    lengths: list[int] = []
    while sum(lengths) < length:
        drawn = torch.randn((), generator=generator) * SPREAD
        lengths.append(max(8, min(int(MEAN_DOCUMENT * drawn.exp()), length - sum(lengths))))
    lengths[-1] -= sum(lengths) - length
    return [n for n in lengths if n > 0]


def time_step(model: LlamaForCausalLM, run: Callable[[], Tensor]) -> tuple[float, float]:
    """Return a forward and backward pass' CPU seconds last, wall seconds first."""
    model.zero_grad(set_to_none=True)
    synchronise(model)
    start, start_cpu = time.perf_counter(), time.process_time()
    run().float().square().mean().backward()
    synchronise(model)
    return time.perf_counter() - start, time.process_time() - start_cpu


def synchronise(model: LlamaForCausalLM) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
