"""The teacher's world: serve losses until the student has no more requests."""

import logging
import os
import signal
from argparse import Namespace
from datetime import timedelta

import torch
from torch import distributed as dist

from megatron_plugin.arguments import TeacherOptions, VocagOptions
from megatron_plugin.bridge import IDLE_TIMEOUT, Pairing, TeacherBridge, TeacherRows
from megatron_plugin.checks import ranks_of_student
from megatron_plugin.teacher.model import Teacher, num_expert_ranks
from megatron_plugin.teacher.setup import load_teacher
from megatron_plugin.upstream import model_parallel_cuda_manual_seed, parallel_state
from megatron_plugin.worlds import World
from pipeline.packing.opening import OpenedRun

logger = logging.getLogger(__name__)


def serve(options: VocagOptions, world: World, opened: OpenedRun, args: Namespace) -> None:
    """Be one rank of the teacher's world, to the end of the job."""
    assert world.bridge_store is not None
    if args.exit_signal_handler:
        # The student needs losses until it has saved, then ends this process.
        for ignored in {signal.SIGTERM, args.exit_signal}:
            signal.signal(ignored, signal.SIG_IGN)
    _start_ranks(options.teacher, world, args)
    teacher = load_teacher(options, opened, args)
    # First, so that ranks without a bridge wait in it.
    group, bridge = _waiting_group(), None
    leader = dist.get_process_group_ranks(group)[-1]  # has the losses
    if world.rank == leader:
        students = (world.job_size - world.size) // ranks_of_student(args)
        pairing = Pairing(students, options.teacher.num_replicas)
        replica = parallel_state.get_data_parallel_rank() // num_expert_ranks()
        bridge = TeacherBridge(world.bridge_store, pairing, replica=replica)
    num_rows = _answer_requests(teacher, bridge, group, leader)
    logger.info("teacher rank %d scored %d rows", world.rank, num_rows)
    dist.barrier()
    dist.destroy_process_group()


def _start_ranks(teacher: TeacherOptions, world: World, args: Namespace) -> None:
    if not torch.cuda.is_available():  # the student's ranks hear it from Megatron
        raise ValueError(
            f"Megatron needs CUDA, and torch {torch.__version__} sees no GPU here; see vocag doctor"
        )
    # Both worlds may share one device in trials.
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(
        args.distributed_backend,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        store=world.store,
        rank=world.rank,
        world_size=world.size,
    )
    parallel_state.initialize_model_parallel(
        teacher.tensor_model_parallel_size,
        teacher.pipeline_model_parallel_size,
        expert_model_parallel_size=teacher.expert_model_parallel_size,
        create_gloo_process_groups=False,  # unused, and each connects all ranks
    )
    model_parallel_cuda_manual_seed(1)  # required by Megatron's layers; nothing is random


def _waiting_group() -> dist.ProcessGroup:
    """Return a replica's CPU group to wait in: NCCL's watchdog would see a hang."""
    own = dist.get_process_group_ranks(
        parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    )
    replicas = [own] * dist.get_world_size()
    dist.all_gather_object(replicas, own)
    # All ranks make all groups: torch 2.11 gives one that its members make alone
    # (use_local_synchronization) another name on each, and they wait for ever.
    groups = {
        ranks: dist.new_group(list(ranks), timeout=IDLE_TIMEOUT, backend="gloo")
        for ranks in sorted(set(map(tuple, replicas)))
    }
    group = groups[tuple(own)]
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


def _answer_requests(
    teacher: Teacher, bridge: TeacherBridge | None, group: dist.ProcessGroup, leader: int
) -> int:
    num_rows = 0
    while True:
        message = [bridge.receive() if bridge is not None else None]
        dist.broadcast_object_list(message, src=leader, group=group)
        requests: list[TeacherRows] = message[0] or []
        if not requests:
            return num_rows
        num_rows += sum(len(request) for request in requests)
        together = TeacherRows(
            torch.cat([request.input_ids for request in requests]),
            torch.cat([request.cu_seqlens for request in requests]),
        )
        answer = teacher.score(together)
        if bridge is not None:
            assert answer is not None
            bridge.reply(answer.values.split([len(request) for request in requests]))
