"""A rank of a job: `megatron_plugin.pretrain_gpt` on the CPU, as a user would start it.

VOCAG_TEST_DUMP: folder for the first step's gradients, the last step's weights and the last
validation's losses. VOCAG_TEST_SCRIPT: run this file instead of our own main.
VOCAG_TEST_CUT_BRIDGE: the teacher's end drops its connections after so many replies.
"""

import os
import runpy
import socket
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


def cut_bridge(after):
    """Shut the bridge's connections down, as a failing network would; both worlds live on."""
    connect, reply = bridge._Link.__init__, bridge.TeacherBridge.reply
    links, replies = [], []

    def connect_and_note(self, *given, **named):
        before = open_sockets()
        connect(self, *given, **named)
        links.extend(open_sockets() - before)

    def reply_and_cut(self, scores):
        reply(self, scores)
        replies.append(scores)
        if len(replies) == after:
            assert links
            for number in links:
                with socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    bridge._Link.__init__, bridge.TeacherBridge.reply = connect_and_note, reply_and_cut


def open_sockets():
    """Return this process's connected sockets, by their file numbers."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_symlink() or not os.readlink(entry).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as connection:
            try:
                connection.getpeername()
            except OSError:  # it only listens
                continue
        found.add(int(entry.name))
    return found


def main():
    """Train as the environment and the command line say."""
    torch.set_num_threads(1)
    if "VOCAG_TEST_DUMP" in os.environ:
        dump_steps(Path(os.environ["VOCAG_TEST_DUMP"]))
        dump_validation(Path(os.environ["VOCAG_TEST_DUMP"]))
    if "VOCAG_TEST_CUT_BRIDGE" in os.environ:
        cut_bridge(after=int(os.environ["VOCAG_TEST_CUT_BRIDGE"]))
    if "VOCAG_TEST_SCRIPT" in os.environ:
        runpy.run_path(os.environ["VOCAG_TEST_SCRIPT"], run_name="__main__")
    else:
        pretrain_gpt.main()


# Megatron's checkpoint writer starts processes that import this file again.
if __name__ == "__main__":
    main()
