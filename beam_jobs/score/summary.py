"""What `vocag score` says: what a job will take, and what it has done."""

from __future__ import annotations

from collections.abc import Sequence

from beam_jobs import storage
from beam_jobs.score.steps import WorkDone
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
_TABLE_BYTES, _ROW_BYTES = 2130, 24
"""Of the table of documents' scores: what it takes empty, and a document's row with its id."""


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
        + _TABLE_BYTES
        + _ROW_BYTES * shard.num_documents
        for shard in shards
        if not there.get(sidecar_name(shard.file, teacher))
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
        f"  context         {describe_context(scores.rule)}; "
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
        return [f"  engine          {describe_engine(rule)}"]
    padding = format_share(work.num_places - work.num_tokens, work.num_places)
    return [f"  padding         {padding}"]


def describe_context(rule: TeacherRule) -> str:
    """Return where texts are split, and what stands before them."""
    context = ContextRule.from_json(rule.context)
    first = context.first_token_id
    return f"{context.describe()}, {'nothing' if first is None else f'token {first}'} before a text"


def describe_engine(rule: TeacherRule) -> str:
    """Return the teacher's dtype and what runs it."""
    return rule.dtype if rule.engine is None else f"{rule.dtype}, by {rule.engine.describe()}"
