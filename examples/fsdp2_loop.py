"""The teacher-guided loss under FSDP2, as torchtitan trains; a killed run continues exactly.

torchrun --nproc-per-node 8 examples/fsdp2_loop.py --data aligned --stored-losses smollm2
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard

import vocag

OPTIONS: dict[str, Any] = {"data": "aligned", "stored-losses": "", "output": Path("run")}
OPTIONS |= {"student": "TinyLlama/TinyLlama_v1.1", "seq-length": 512, "num-steps": 1000}
OPTIONS |= {"global-batch-size": 64, "micro-batch-size": 4, "lr": 8e-5, "checkpoint-every": 100}


def main() -> None:
    """Train a student, or continue to; leave it in OUTPUT/model."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    dist.init_process_group()
    rank, ranks, size = dist.get_rank(), dist.get_world_size(), options.global_batch_size
    sizes: dict[str, Any] = {"seq_length": options.seq_length, "global_batch_size": size}
    teaching = vocag.Teaching(stored_losses=options.stored_losses)
    config = vocag.StreamConfig(options.data, teaching=teaching, **sizes)
    saved, method = None, vocag.Method("teacher", scope="row")
    for last in sorted(options.output.glob("step-*/.metadata"))[-1:]:  # the file written last
        kept: dict[str, Any] = {"rows": dict.fromkeys(vocag.StreamState.__dataclass_fields__)}
        dcp.load(kept, checkpoint_id=last.parent)
        saved = vocag.StreamState(**kept["rows"])
    opened = vocag.open_training(config, options.student, method, saved=saved)
    rows, guided, student = opened.rows, opened.guided.train(), cast(Any, opened.student)
    for module in (*student.model.layers, guided):  # it last: the loss needs the whole output
        fully_shard(module)
    weights = list(guided.parameters())
    adam = torch.optim.AdamW(weights, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    used = rows.restore(saved) if saved else 0  # refuses other rows
    if saved:
        model, moments = states.get_state_dict(student, adam)  # which counts as one step of adam
        dcp.load({"model": model, "moments": moments}, checkpoint_id=last.parent)
        states.set_state_dict(student, adam, model_state_dict=model, optim_state_dict=moments)
    split: dict[str, Any] = {"replica": rank, "num_replicas": ranks, "consumed_samples": used}
    split |= {"num_samples": options.num_steps * size, "micro_batch_size": options.micro_batch_size}
    loader = iter(vocag.load_batches(rows, **split))  # which refuses more steps than there are
    for step in range(used // size + 1, options.num_steps + 1):
        sums = torch.zeros(2, device=weights[0].device)  # nats, tokens
        for _ in range(size // options.micro_batch_size // ranks):
            loss = guided(next(loader).to(sums.device), step=step)
            loss.loss_sum.backward()
            sums += torch.stack((loss.loss_sum.detach(), loss.num_tokens))
        dist.all_reduce(sums)
        for gradient in [weight.grad for weight in weights if weight.grad is not None]:
            gradient *= ranks / sums[1].clamp_min(1)  # FSDP has averaged the processes' sums
        torch.nn.utils.clip_grad_norm_(weights, 1.0, error_if_nonfinite=True)
        adam.step()
        adam.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {sums[0] / sums[1].clamp_min(1):.6f}", flush=True)
        if step % options.checkpoint_every == 0:
            model, moments = states.get_state_dict(student, adam)
            kept = {"model": model, "moments": moments, "rows": asdict(rows.state(step * size))}
            dcp.save(kept, checkpoint_id=options.output / f"step-{step:08d}")
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    trained = states.get_model_state_dict(student, options=whole)
    if rank == 0:
        student.save_pretrained(options.output / "model", state_dict=trained)
        opened.tokenizer.write(options.output / "model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
