"""A rank of a job: `megatron_plugin.pretrain_gpt` on the CPU, as a user would start it.

VOCAG_TEST_DUMP: folder for the first step's gradients, the last step's weights and the last
validation's losses. VOCAG_TEST_SCRIPT: run this file instead of our own main.
VOCAG_TEST_WAITS: print where the host waits in the second step, of the student or the teacher, and
the size of its largest tensor, the vocabulary's chunks being as small as they can be.
VOCAG_TEST_CUT_BRIDGE: the teacher's end drops its connections after so many replies.
"""

import os
import runpy
import time
from pathlib import Path

from tests.megatron_plugin import cpu_shim  # noqa: F401  before anything of megatron

# isort: split

import torch
from megatron.core import parallel_state
from megatron.training import training
from torch import distributed as dist

from megatron_plugin import bridge, pretrain_gpt
from megatron_plugin.models.weight_rules import whole_model_names
from megatron_plugin.student import forward_step
from megatron_plugin.teacher.model import Teacher
from pipeline.losses import logits
from tests.megatron_plugin.host_waits import HostWaits


def dump_steps(folder):
    """Save the first step's gradients as the optimiser gets them, and each step's weights."""
    original = training.train_step

    def train_step(forward_step, iterator, model, optimizer, *rest, **named):
        step = optimizer.step

        def save_and_step():
            if not (folder / f"gradients-{dist.get_rank()}.pt").exists():
                save(folder, "gradients", model, lambda parameter: parameter.main_grad)
            return step()

        optimizer.step = save_and_step
        try:
            return original(forward_step, iterator, model, optimizer, *rest, **named)
        finally:
            optimizer.step = step
            save(folder, "weights", model, lambda parameter: parameter.detach())

    training.train_step = train_step


def save(folder, what, model, value):
    """Write one rank's slices, and which slices they are."""
    slices = {
        name: value(parameter).clone()
        for chunk in model
        for name, parameter in whole_model_names(chunk).items()
    }
    place = {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "replica": parallel_state.get_data_parallel_rank(),
    }
    torch.save({"slices": slices, **place}, folder / f"{what}-{dist.get_rank()}.pt")


def dump_validation(folder):
    """Save each token's loss of the last validation micro-batch, with its rows."""
    original = forward_step.validation_loss

    def validation_loss(rules, batch, output):
        # A batch's fields are views of one tensor.
        rows = {name: tensor.clone() for name, tensor in batch.rows.items()}
        found = {"losses": output.detach(), "rows": rows}
        torch.save(found, folder / f"validation-{dist.get_rank()}.pt")
        return original(rules, batch, output)

    forward_step.validation_loss = validation_loss


def print_waits(owner, name):
    """Print each place where the host waits in the second call of a function, and how often."""
    original, calls = getattr(owner, name), []

    def counted(*given, **named):
        calls.append(name)
        if len(calls) != 2:
            return original(*given, **named)
        with HostWaits() as waits:
            done = original(*given, **named)
        for place, count in sorted(waits.found.items()):
            print(f"{name} waits {count} at {place}")
        print(f"{name} holds {waits.most_elements}")
        return done

    setattr(owner, name, counted)


def cut_bridge(after):
    """Close the bridge's connections, as a failing network would; both worlds live on."""
    reply, replies = bridge.TeacherBridge.reply, []
    bridge._GRACE_SECONDS = 0.1

    def reply_and_cut(self, losses):
        reply(self, losses)
        replies.append(losses)
        if len(replies) == after:
            for link in self._links.values():
                del link._group
            time.sleep(600)

    bridge.TeacherBridge.reply = reply_and_cut  # type: ignore[method-assign]


def main():
    torch.set_num_threads(1)
    if "VOCAG_TEST_DUMP" in os.environ:
        dump_steps(Path(os.environ["VOCAG_TEST_DUMP"]))
        dump_validation(Path(os.environ["VOCAG_TEST_DUMP"]))
    if "VOCAG_TEST_WAITS" in os.environ:
        logits._CPU_CHUNK_ELEMENTS = 1
        print_waits(training, "train_step")
        print_waits(Teacher, "score")
    if "VOCAG_TEST_CUT_BRIDGE" in os.environ:
        cut_bridge(after=int(os.environ["VOCAG_TEST_CUT_BRIDGE"]))
    if "VOCAG_TEST_SCRIPT" in os.environ:
        runpy.run_path(os.environ["VOCAG_TEST_SCRIPT"], run_name="__main__")
    else:
        pretrain_gpt.main()


# Megatron's checkpoint writer starts processes that import this file again.
if __name__ == "__main__":
    main()
