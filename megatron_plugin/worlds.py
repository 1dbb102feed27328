"""Two worlds in one torchrun job: the first ranks are the student's, the last the teacher's.

Each has its own prefix of torchrun's store, so Megatron sees only its ranks.
"""

import os
import shlex
import sys
from dataclasses import dataclass

from torch import distributed as dist

from megatron_plugin.arguments import ArgumentError
from megatron_plugin.bridge import START_TIMEOUT, Role
from pipeline.command_line.failures import hinted


@dataclass(frozen=True)
class World:
    """This process's world.

    `store` is for `init_process_group`, None: torch's default; `bridge_store` is both worlds', None
    if the teacher has no world.
    """

    role: Role
    rank: int
    size: int
    job_size: int
    store: dist.Store | None = None
    bridge_store: dist.Store | None = None


def enter_world(num_teacher_ranks: int) -> World:
    """Join this rank's world.

    Sets `RANK` and `WORLD_SIZE`, so call it before Megatron reads them. ArgumentError without
    torchrun or student ranks.
    """
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as error:
        missing = ArgumentError(
            f"{error.args[0]} isn't set: start with torchrun, also for one process (torchrun "
            "--nproc-per-node 1 -m megatron_plugin.pretrain_gpt)"
        )
        again = ["torchrun", "--nproc-per-node", "1", "-m", "megatron_plugin.pretrain_gpt"]
        raise hinted(missing, shlex.join([*again, *sys.argv[1:]])) from error
    if not num_teacher_ranks:
        return World("student", rank, size, size)
    num_student_ranks = size - num_teacher_ranks
    if num_student_ranks < 1:
        refusal = ArgumentError(
            f"--vocag-teacher-world-size {num_teacher_ranks} leaves {num_student_ranks} of the "
            f"job's {size} ranks for the student: start more ranks (torchrun --nproc-per-node) or "
            "lower it"
        )
        raise hinted(refusal, f"torchrun --nproc-per-node {num_teacher_ranks + 1}")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, _, _ = next(dist.rendezvous("env://", timeout=START_TIMEOUT))
    shared = dist.PrefixStore(f"vocag/{attempt}", store)
    role: Role = "student"
    if rank >= num_student_ranks:
        role, rank = "teacher", rank - num_student_ranks
    own_size = num_student_ranks if role == "student" else num_teacher_ranks
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(own_size)
    return World(role, rank, own_size, size, dist.PrefixStore(role, shared), shared)
