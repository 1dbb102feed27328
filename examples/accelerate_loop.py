"""The teacher-guided loss in a loop of your own, under Hugging Face accelerate.

    accelerate launch --num_processes 8 examples/accelerate_loop.py --data aligned \
        --student TinyLlama/TinyLlama_v1.1 --stored-losses Qwen/Qwen2.5-Math-7B --output student

`GuidedStudent` is a module whose forward pass is its loss, so that whatever accelerate wraps it in
(DistributedDataParallel, FSDP, mixed precision) works. The loss is exact: summed over
micro-batches and processes, and divided once by all tokens that were kept.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vocag import (
    AlignedRows,
    GuidedStudent,
    Method,
    Rows,
    StreamConfig,
    Teaching,
    load_batches,
    load_language_model,
    prove_tokenizer,
)


def train(options: argparse.Namespace) -> list[float]:
    """Train a student; return the loss of each step."""
    accelerator = Accelerator()
    rows = AlignedRows(
        StreamConfig(
            options.data,
            seq_length=options.seq_length,
            global_batch_size=options.global_batch_size,
            teaching=Teaching(stored_losses=options.stored_losses),
        )
    )
    # Not `prepare`d: each process reads its own rows already, in the order that resumes exactly.
    loader = iter(
        load_batches(
            rows,
            micro_batch_size=options.micro_batch_size,
            replica=accelerator.process_index,
            num_replicas=accelerator.num_processes,
        )
    )
    student = load_language_model(options.student)
    tokenizer = prove_tokenizer(rows, student)  # of the data, and the student's chat template
    guided: nn.Module = GuidedStudent(student, Method("teacher", scope="row"))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        guided.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    guided, optimizer = accelerator.prepare(guided, optimizer)
    losses = []
    for step in range(options.num_steps):
        losses.append(train_step(accelerator, guided, optimizer, loader, step, options))
        accelerator.print(f"step {step + 1}: loss {losses[-1]:.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(guided).model.save_pretrained(options.output)
        tokenizer.write(options.output)
    accelerator.end_training()
    return losses


def train_step(
    accelerator: Accelerator,
    guided: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterator[Rows],
    step: int,
    options: argparse.Namespace,
) -> float:
    """Make one update; return its loss over all processes."""
    guided.train()
    share = options.micro_batch_size * accelerator.num_processes
    num_own = options.global_batch_size // share
    sums: Tensor = torch.zeros(2, device=accelerator.device)  # nats, tokens
    for number in range(num_own):
        batch = next(loader).to(accelerator.device)
        last = number == num_own - 1
        with nullcontext() if last else accelerator.no_sync(guided):
            loss = guided(batch, step=step)
            accelerator.backward(loss.loss_sum)
        sums += torch.stack((loss.loss_sum.detach(), loss.num_tokens))
    nats, tokens = accelerator.reduce(sums, "sum").tolist()
    if not tokens:
        accelerator.print(f"step {step + 1} kept no token: nothing is learned from it")
    for parameter in guided.parameters():
        if parameter.grad is not None:  # the wrapper has averaged the sums of the processes
            parameter.grad *= accelerator.num_processes / max(tokens, 1)
    norm = float(accelerator.clip_grad_norm_(guided.parameters(), 1.0))
    # In all processes, before it ruins the weights; fp16's scaler skips what overflows.
    if accelerator.scaler is None and not math.isfinite(norm):
        raise ValueError(f"step {step + 1}: the gradient's norm is {norm}; lower --learning-rate")
    optimizer.step()
    optimizer.zero_grad()
    return float(nats / max(tokens, 1))


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description="The guided loss in an accelerate loop.")
    parser.add_argument("--data", required=True, help="aligned dataset")
    parser.add_argument("--student", required=True, help="folder or repository")
    parser.add_argument("--stored-losses", default="", help="what vocag score has stored")
    parser.add_argument("--output", required=True, type=Path, help="folder of the trained student")
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=8e-5)
    return train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
