r"""Score a dataset with a teacher that needs several GPUs: `vocag score` under torchrun.

    torchrun --nproc-per-node 8 -m megatron_plugin.score aligned --teacher models/teacher \
        --seq-length 2048 --tensor-model-parallel-size 4

Writes the sidecars and the score manifest that `beam_jobs.score` writes, under the same names: the
same weights, dtype and lengths are the same teacher, so either goes on where the other stopped.
Ranks that hold one copy of the teacher score a shard together; copies share out the shards. Several
documents stand in each row, whose attention keeps to them.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_plugin.arguments import ArgumentError, Dtype, TeacherOptions
from megatron_plugin.bridge import TeacherRows
from megatron_plugin.teacher.model import Teacher
from megatron_plugin.teacher.replica import (
    num_replicas,
    replica_group,
    replica_index,
    replica_ranks,
)
from megatron_plugin.teacher.score_rows import pack_pieces, place_losses
from megatron_plugin.teacher.setup import load_teacher
from megatron_plugin.upstream import model_parallel_cuda_manual_seed, parallel_state
from pipeline.dataset.conventions import choose_conventions
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.models.teacher_files import TeacherFiles, find_teacher
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.sidecars import accept_sidecar, make_sidecar, read_teacher_tokens
from schemas.sidecar import (
    ScoreManifest,
    SidecarRecord,
    TeacherRule,
    encode_score_manifest,
    score_manifest_name,
    sidecar_name,
)
from vocag_cli.options import DatasetSource, ModelSource, TokenName, parse_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreOptions:
    """Score a dataset with a teacher that needs several GPUs: `vocag score` under torchrun.

    Attributes:
        dataset: folder of a finished dataset, seen by all ranks.
        teacher: Hugging Face folder or repository.
        seq_length: student tokens per training row.
        teacher_seq_length: teacher tokens per row (default: the dataset's ratio plus 12.5 %).
        student_bos: token before a student's text, its id, or none (default: the dataset's).
        student_eos: token after a student's document, its id, or none (default: the dataset's).
        teacher_context: token before a teacher's text, its id, or none (default: the dataset's).
        tensor_model_parallel_size: tensor-parallel ranks of each copy of the teacher.
        pipeline_model_parallel_size: pipeline-parallel ranks of each copy of the teacher.
        expert_model_parallel_size: expert-parallel ranks of each copy of the teacher.
        micro_batch_size: rows per forward pass.
        dtype: of the teacher's weights.
        distributed_backend: library by which ranks exchange tensors.
        allow_untrained_teacher: accept a teacher that predicts a probe text no better than chance.
    """

    dataset: DatasetSource
    teacher: ModelSource
    seq_length: int
    teacher_seq_length: int | None = None
    student_bos: TokenName | None = None
    student_eos: TokenName | None = None
    teacher_context: TokenName | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    micro_batch_size: int = 1
    dtype: Dtype = "bfloat16"
    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    allow_untrained_teacher: bool = False


@record
def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank of the job."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parse_options(ScoreOptions, argv, prog="megatron_plugin.score")
    dataset = open_dataset(options.dataset)
    manifest = choose_conventions(
        dataset,
        student_bos=options.student_bos,
        student_eos=options.student_eos,
        teacher_context=options.teacher_context,
    )
    dataset = replace(dataset, manifest=manifest)
    if not dataset.is_local:
        raise ArgumentError(
            f"{options.dataset} isn't a folder that all ranks see: mount it, or run vocag score"
        )
    found = find_teacher(options.teacher)
    if found.is_gguf:
        raise ArgumentError(f"{options.teacher}: a GGUF file is scored with by vocag score only")
    context = ContextRule.of_dataset(
        dataset.manifest,
        seq_length=options.seq_length,
        teacher_seq_length=options.teacher_seq_length,
    )
    _initialise(options)
    tokenizer = dataset.manifest.teacher.sha256
    rule = TeacherRule(_common_digest(found), options.dtype, tokenizer, context.to_json())
    teacher = load_teacher(
        # No ranks: `_initialise` has made the process groups.
        TeacherOptions(
            str(found.path), micro_batch_size=options.micro_batch_size, dtype=options.dtype
        ),
        dataset.manifest,
        data=options.dataset,
        seq_length=context.teacher_seq_length,
        device=torch.device("cuda"),
        allow_untrained=options.allow_untrained_teacher,
        accepted_by="--allow-untrained-teacher",
    )
    records = _score_shards(teacher, dataset, rule, context)
    if dist.get_rank() == 0:
        scores = ScoreManifest(dataset.manifest.fingerprint, rule, options.teacher, records)
        path = Path(dataset.location, score_manifest_name(rule.fingerprint))
        _write(path, encode_score_manifest(scores))
        logger.info("next: train with --vocag-stored-losses %s", path)
    dist.barrier()
    dist.destroy_process_group()


def _score_shards(
    teacher: Teacher, dataset: Dataset, rule: TeacherRule, context: ContextRule
) -> tuple[SidecarRecord, ...]:
    """Score this replica's shards; return the records of all, on every rank."""
    own: dict[int, SidecarRecord] = {}
    for shard in range(replica_index(), len(dataset.manifest.shards), num_replicas()):
        scored = _score_shard(teacher, dataset, shard, rule, context)
        if scored is not None:
            own[shard] = scored
    gathered: list[dict[int, SidecarRecord] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    found = {shard: one for part in gathered if part for shard, one in part.items()}
    return tuple(found[shard] for shard in sorted(found))


def _score_shard(
    teacher: Teacher, dataset: Dataset, shard: int, rule: TeacherRule, context: ContextRule
) -> SidecarRecord | None:
    """Score a shard and write its sidecar; return its record on the rank that has the losses."""
    shard_record, fingerprint = dataset.manifest.shards[shard], rule.fingerprint
    index = dataset.read_index(shard, with_names=True)
    pieces = context.pieces(index)
    path = Path(dataset.location, sidecar_name(shard_record.file, fingerprint))
    earlier = None
    if path.is_file():
        earlier = accept_sidecar(
            path.read_bytes(),
            shard_record=shard_record,
            index=index,
            pieces=pieces,
            teacher=fingerprint,
        )
    # One rank decides for all that score together: a file may appear while they look.
    decided = [earlier]
    ranks = replica_ranks()
    dist.broadcast_object_list(decided, src=ranks[0], group=replica_group())
    if decided[0] is not None:
        return decided[0]
    tokens = read_teacher_tokens(dataset, shard, index)
    rows = pack_pieces(tokens, pieces, context, num_rows=teacher.micro_batch_size)
    scores = teacher.score(
        TeacherRows(torch.from_numpy(rows.input_ids), torch.from_numpy(rows.cu_seqlens))
    )
    if scores is None or dist.get_rank() != ranks[-1]:
        return None
    losses: NDArray[np.float32] = place_losses(
        scores.losses.float().cpu().numpy(), rows, num_tokens=len(tokens.input_ids)
    )
    data, made = make_sidecar(
        losses, tokens.starts, shard_record=shard_record, pieces=pieces, teacher=fingerprint
    )
    _write(path, data)
    speed = scores.num_tokens / max(scores.seconds, 1e-9)
    logger.info("%s: %d tokens, %.0f tokens/s", path.name, made.num_tokens, speed)
    return made


def _initialise(options: ScoreOptions) -> None:
    """Start this job's process groups; all ranks are the teacher's."""
    tensor, pipeline, expert = (
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.expert_model_parallel_size,
    )
    if "RANK" not in os.environ:
        raise ArgumentError("RANK isn't set: start with torchrun, also for one process")
    if int(os.environ["WORLD_SIZE"]) % (tensor * pipeline * expert):
        raise ArgumentError(
            f"{os.environ['WORLD_SIZE']} ranks are no multiple of {tensor} tensor-parallel by "
            f"{pipeline} pipeline-parallel by {expert} expert-parallel ranks: change torchrun's "
            "--nproc-per-node or the sizes"
        )
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    # Replicas meet at the end only, and one may have longer shards.
    dist.init_process_group(options.distributed_backend, timeout=timedelta(days=1))
    parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
    model_parallel_cuda_manual_seed(1)


def _common_digest(found: TeacherFiles) -> str:
    """Hash a teacher on one rank of each machine; they must all hold the same."""
    own = found.sha256 if int(os.environ.get("LOCAL_RANK", "0")) == 0 else None
    gathered: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    digests = {digest: rank for rank, digest in enumerate(gathered) if digest is not None}
    if len(digests) != 1:
        differing = ", ".join(f"{digest[:16]}… on rank {rank}" for digest, rank in digests.items())
        raise ArgumentError(
            f"{found.source} has SHA-256 {differing}: the machines hold different files; copy the "
            "same to all, or name a folder that all of them see"
        )
    return next(iter(digests))


def _write(path: Path, data: bytes) -> None:
    """Write a file that readers see either whole or not at all."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        main()
    except ValueError as error:
        sys.exit(f"megatron_plugin.score: {error}")
