"""What `vocag score` says: what a job will take, and what it has done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from beam_jobs import storage
from beam_jobs.score.steps import ReadyTeacher, ScoreJob, WorkDone
from beam_jobs.shortages import describe_room
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_share,
    format_short,
)
from pipeline.scoring.contexts import ContextRule
from schemas.manifest import ShardRecord
from schemas.sidecar import ScoreManifest, TeacherRule, score_manifest_name, sidecar_name

_LOSS_BYTES, _START_BYTES = 2, 4
_HEADER_BYTES, _RECORD_BYTES = 400, 600
"""Of a sidecar: its header of safetensors with the metadata, and its share of the manifest."""


def estimate_disk(dataset: str, shards: Sequence[ShardRecord], teacher: str) -> int:
    """Return how many bytes a job will add to a dataset's disk, to a percent; no sidecar twice.

    Args:
        dataset: its folder.
        shards: with the documents and tokens that are scored.
        teacher: fingerprint of the `TeacherRule`.
    """
    there = storage.list_folder(dataset)
    return sum(
        _LOSS_BYTES * shard.num_teacher_tokens
        + _START_BYTES * (shard.num_documents + 1)
        + _HEADER_BYTES
        + _RECORD_BYTES
        for shard in shards
        if not there.get(sidecar_name(shard.file, teacher))
    )


def describe_job(job: ScoreJob, shards: Sequence[ShardRecord], reused: str) -> str:
    """Return what a job would read and write, in lines.

    Args:
        job: the job.
        shards: with the documents and tokens that are scored.
        reused: of `describe_reuse`; "" without --reuse.
    """
    rule, folder = job.rule, job.dataset
    there = storage.list_folder(folder)
    done = sum(sidecar_name(shard.file, rule.fingerprint) in there for shard in shards)
    need = format_bytes(estimate_disk(folder, shards, rule.fingerprint))
    lines = [
        "dry run: nothing was written",
        f"  dataset         {format_plural(len(shards), 'shard')}, "
        f"{format_count(sum(shard.num_teacher_tokens for shard in shards))} teacher tokens in "
        f"{format_plural(sum(shard.num_documents for shard in shards), 'document')}",
        f"  teacher         {_describe_engine(rule)}; its scores are "
        f"{score_manifest_name(rule.fingerprint)}, {format_plural(done, 'sidecar')} there",
        *([f"  where           {rule.where}"] if rule.where else []),
        *([f"  reused          {reused}"] if reused else []),
        f"  context         {_describe_context(rule)}",
        f"  disk            {need}{describe_room(folder)}",
        "  time            --limit 100 tries a hundred documents and reports their speed",
    ]
    return "\n".join(lines)


def describe_reuse(teacher: ReadyTeacher) -> str:
    """Return how many documents' losses are known, and how many are left; no teacher is loaded."""
    known, left = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for number in range(len(teacher.documents.dataset.manifest.shards)):
        shard = teacher.shard(number)
        is_known = teacher.known.find(shard.read_tokens(), shard.pieces, teacher.context) >= 0
        own = np.array([is_known.sum(), shard.lengths[is_known].sum()])
        known += own
        left += np.array([shard.num_documents, shard.lengths.sum()]) - own
    (num_known, known_tokens), (num_left, tokens_left) = known.tolist(), left.tolist()
    return (
        f"{format_plural(num_known, 'document')} with {format_count(known_tokens)} teacher tokens; "
        f"{format_plural(num_left, 'document')} with {format_count(tokens_left)} to compute"
    )


def summarise(
    scores: ScoreManifest,
    run: WorkDone,
    *,
    dataset: str,
    reuse: Sequence[str],
    elapsed_seconds: float,
) -> str:
    """Return the lines that end a run."""
    sidecars = scores.sidecars
    num_tokens = sum(record.num_tokens for record in sidecars)
    num_losses = sum(record.num_losses for record in sidecars)
    num_bytes = sum(record.num_bytes for record in sidecars)
    num_split = sum(record.num_split_documents for record in sidecars)
    mean = sum(record.loss_sum for record in sidecars) / max(1, num_losses)
    speed = run.num_tokens / max(elapsed_seconds, 1e-9)
    path = storage.join(dataset, score_manifest_name(scores.rule.fingerprint))
    lines = [
        f"scored {format_plural(run.num_documents, 'document')} in "
        f"{format_duration(elapsed_seconds)}: {format_short(speed)} teacher tokens/s",
        f"  teacher tokens  {format_count(num_tokens)}, mean loss {mean:.3f} nats",
        f"  context         {_describe_context(scores.rule)}; "
        f"{format_plural(num_split, 'document')} split",
        f"  sidecars        {len(sidecars)}, {format_bytes(num_bytes)}, "
        f"{num_bytes / max(1, num_tokens):.3f} bytes a teacher token",
        *_describe_work(scores.rule, run),
    ]
    if scores.rule.where:
        lines.append(f"  where           {scores.rule.where}: other documents have no losses")
    if reuse:
        lines.append(
            f"  reused          {format_plural(run.num_known_documents, 'document')}, the other "
            f"{format_count(run.num_documents)} computed: {', '.join(reuse)}"
        )
    if run.num_resumed_shards:
        lines.append(f"  resumed         {run.num_resumed_shards} shards were taken over")
    return "\n".join([*lines, f"next: train with --stored-losses {path}"])


def _describe_work(rule: TeacherRule, run: WorkDone) -> list[str]:
    """Return what the losses cost, of what their engine tells."""
    work = run.work
    if rule.engine is not None:
        asked = ""
        if work.num_requests:
            asked = (
                f"; {format_plural(work.num_requests, 'request')}, {work.num_retries} of them "
                "asked again"
            )
        return [f"  engine          {_describe_engine(rule)}{asked}"]
    rate = work.num_operations / max(run.ideal_seconds, 1e-9)
    return [
        f"  padding         {format_share(work.num_places - work.num_tokens, work.num_places)}",
        f"  arithmetic      {format_share(run.ideal_seconds, work.seconds)} of the "
        f"{format_short(rate)}FLOP/s that plain matrix products reach here ({rule.dtype})",
    ]


def _describe_context(teacher: TeacherRule) -> str:
    rule = ContextRule.from_json(teacher.context)
    first = rule.first_token_id
    before = "nothing" if first is None else f"token {first}"
    return f"{rule.describe()}, {before} before a text"


def _describe_engine(rule: TeacherRule) -> str:
    return rule.dtype if rule.engine is None else f"{rule.dtype}, by {rule.engine.describe()}"
