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
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_plugin.arguments import ArgumentError, TeacherOptions
from megatron_plugin.bridge import TeacherRows
from megatron_plugin.teacher.model import Teacher
from megatron_plugin.teacher.replica import (
    num_replicas,
    replica_group,
    replica_index,
    replica_ranks,
)
from megatron_plugin.teacher.score_rows import pack_pieces, place_losses
from megatron_plugin.teacher.setup import load_teacher, start_ranks
from megatron_plugin.worlds import enter_world
from pipeline.dataset.files import Dataset
from pipeline.dataset.selection import ChosenDocuments, select_documents
from pipeline.models.teacher_files import TeacherFiles, find_teacher
from pipeline.packing.opening import open_run
from pipeline.packing.reading import Reading
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.sidecars import ShardToScore
from schemas.sidecar import (
    ScoreManifest,
    SidecarRecord,
    TeacherRule,
    encode_score_manifest,
    score_manifest_name,
    sidecar_name,
)
from vocag_cli.options import Option, parse_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreOptions:
    """Score a dataset with a teacher that needs several GPUs: `vocag score` under torchrun.

    Attributes:
        dataset: what to score, in a folder that all ranks see.
        teacher: the model, and how its ranks share it.
        seq_length: student tokens per training row.
        teacher_seq_length: teacher tokens per row (default: the dataset's ratio plus 12.5 %).
        distributed_backend: library by which ranks exchange tensors.
        allow_untrained_teacher: accept a teacher that predicts a probe text no better than chance.
    """

    dataset: Annotated[Reading, Option(form="positional", without=("generation", "where"))]
    teacher: Annotated[TeacherOptions, Option(without=("world_size", "timeout_minutes"))]
    seq_length: int
    teacher_seq_length: int | None = None
    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    allow_untrained_teacher: bool = False


@record
def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank of the job."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parse_options(ScoreOptions, argv, prog="megatron_plugin.score")
    opened = open_run(options.dataset)
    if opened.mixture.names:
        raise ArgumentError(f"{options.dataset.path} is a mixture: name its datasets instead")
    dataset = replace(opened.dataset, manifest=opened.manifest)
    if not dataset.is_local:
        raise ArgumentError(
            f"{dataset.location} isn't a folder that all ranks see: mount it, or run vocag score"
        )
    if not options.teacher.name:
        raise ArgumentError("--teacher is missing")
    found = find_teacher(options.teacher.name)
    if found.is_gguf:
        raise ArgumentError(f"{found.source}: a GGUF file is scored with by vocag score only")
    context = ContextRule.of_rows(
        opened.rules(seq_length=options.seq_length, teacher_seq_length=options.teacher_seq_length)
    )
    _require_ranks(options.teacher)
    # Replicas meet at the end only, and one may have longer shards.
    start_ranks(options.teacher, options.distributed_backend, timedelta(days=1))
    tokenizer = dataset.manifest.teacher.sha256
    rule = TeacherRule(_common_digest(found), options.teacher.dtype, tokenizer, context.to_json())
    teacher = load_teacher(
        options.teacher,
        opened,
        seq_length=context.teacher_seq_length,
        allow_untrained=options.allow_untrained_teacher,
        accepted_by="--allow-untrained-teacher",
    )
    records = _score_shards(teacher, dataset, rule, context)
    if dist.get_rank() == 0:
        scores = ScoreManifest(dataset.manifest.fingerprint, rule, found.source, records)
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
    documents = select_documents(dataset)
    for shard in range(replica_index(), len(dataset.manifest.shards), num_replicas()):
        scored = _score_shard(teacher, documents, shard, rule, context)
        if scored is not None:
            own[shard] = scored
    gathered: list[dict[int, SidecarRecord] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    found = {shard: one for part in gathered if part for shard, one in part.items()}
    return tuple(found[shard] for shard in sorted(found))


def _score_shard(
    teacher: Teacher,
    documents: ChosenDocuments,
    number: int,
    rule: TeacherRule,
    context: ContextRule,
) -> SidecarRecord | None:
    """Score a shard and write its sidecar; return its record on the rank that has the losses."""
    fingerprint, shard = rule.fingerprint, ShardToScore.open(documents, number, context)
    path = Path(documents.dataset.location, sidecar_name(shard.record.file, fingerprint))
    earlier = shard.accept_sidecar(path.read_bytes(), fingerprint) if path.is_file() else None
    # One rank decides for all that score together: a file may appear while they look.
    decided = [earlier]
    ranks = replica_ranks()
    dist.broadcast_object_list(decided, src=ranks[0], group=replica_group())
    if decided[0] is not None:
        return decided[0]
    tokens = shard.read_tokens()
    rows = pack_pieces(tokens, shard.pieces, context, num_rows=teacher.micro_batch_size)
    start = time.perf_counter()
    of_rows = teacher.score(
        TeacherRows(torch.from_numpy(rows.input_ids), torch.from_numpy(rows.cu_seqlens))
    )
    if of_rows is None or dist.get_rank() != ranks[-1]:
        return None
    losses: NDArray[np.float32] = place_losses(
        of_rows.float().cpu().numpy(), rows, num_tokens=len(tokens.input_ids)
    )
    seconds = time.perf_counter() - start
    data, made = shard.make_sidecar(losses, fingerprint)
    _write(path, data)
    logger.info(
        "%s: %d tokens, %.0f tokens/s", path.name, made.num_tokens, made.num_tokens / seconds
    )
    return made


def _require_ranks(teacher: TeacherOptions) -> None:
    """Check that torchrun has started whole copies of the teacher."""
    num_ranks = enter_world(0).size
    if num_ranks % teacher.ranks_of_replica:
        raise ArgumentError(
            f"{num_ranks} ranks are no multiple of the {teacher.ranks_of_replica} "
            "that hold a copy of the teacher together: change torchrun's --nproc-per-node or the "
            "parallel sizes"
        )


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
