"""The teacher-guided loss in a loop of your own, under Hugging Face accelerate.

    accelerate launch --num_processes 8 examples/accelerate_loop.py --data aligned \
        --student TinyLlama/TinyLlama_v1.1 --stored-losses Qwen/Qwen2.5-Math-7B \
        --seq-length 2048 --output student

`GuidedStudent`'s forward pass is its loss, so wrappers work. It is exact: summed over micro-batches
and processes, and divided once by all tokens that were kept. The last lines save a student that
each process holds whole (DistributedDataParallel); examples/fsdp2_loop.py saves one of FSDP's.
"""

import argparse
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import vocag

OPTIONS: dict[str, Any] = {"data": "aligned", "student": "", "stored-losses": ""}
OPTIONS |= {"output": Path("student"), "num-steps": 1000, "seq-length": 512, "learning-rate": 8e-5}
OPTIONS |= {"global-batch-size": 64, "micro-batch-size": 4}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train a student, leave it in OUTPUT; return the loss of each step."""
    parser = argparse.ArgumentParser(description="The guided loss in an accelerate loop.")
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args(argv)
    accelerator = Accelerator()
    ranks, micro = accelerator.num_processes, options.micro_batch_size
    size, teaching = options.global_batch_size, vocag.Teaching(stored_losses=options.stored_losses)
    config = vocag.StreamConfig(
        options.data, seq_length=options.seq_length, global_batch_size=size, teaching=teaching
    )
    opened = vocag.open_training(config, options.student, vocag.Method("teacher", scope="row"))
    # Not `prepare`d: each process reads its own rows already, in the order that resumes exactly.
    split = {"replica": accelerator.process_index, "num_replicas": ranks}
    split |= {"num_samples": options.num_steps * size}  # more than there are is refused
    batches = iter(vocag.load_batches(opened.rows, micro_batch_size=micro, **split))
    guided: Any = opened.guided.train()
    adam: Any = torch.optim.AdamW(
        guided.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    guided, adam = accelerator.prepare(guided, adam)
    losses = []
    for step in range(options.num_steps):
        sums = torch.zeros(2, device=accelerator.device)  # nats, tokens
        for left in reversed(range(size // micro // ranks)):
            with accelerator.no_sync(guided) if left else nullcontext():
                loss = guided(next(batches).to(accelerator.device), step=step)
                accelerator.backward(loss.loss_sum)
            sums += torch.stack((loss.loss_sum.detach(), loss.num_tokens))
        nats, tokens = accelerator.reduce(sums, "sum").tolist()
        for gradient in [weight.grad for weight in guided.parameters() if weight.grad is not None]:
            gradient *= ranks / max(tokens, 1)  # the wrapper has averaged the processes' sums
        norm = float(accelerator.clip_grad_norm_(guided.parameters(), 1.0))
        # In all processes, before it ruins the weights; fp16's scaler skips what overflows.
        if accelerator.scaler is None and not math.isfinite(norm):
            raise ValueError(f"step {step + 1}: the gradient's norm is {norm}; lower the rate")
        adam.step()
        adam.zero_grad()
        losses.append(nats / max(tokens, 1))
        accelerator.print(f"step {step + 1}: loss {losses[-1]:.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(guided).model.save_pretrained(options.output)
        opened.tokenizer.write(options.output)
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
