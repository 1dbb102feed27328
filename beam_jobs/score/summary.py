"""What `vocag score` says: what a job will take, and what it has done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beam_jobs import storage
from beam_jobs.score.disk import estimate_disk
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
from schemas.manifest import Manifest
from schemas.sidecar import ScoreManifest, TeacherRule, score_manifest_name, sidecar_name


def describe_job(output: str, manifest: Manifest, rule: TeacherRule) -> str:
    """Return what a job would read and write, in lines; nothing is computed for it."""
    shards, there = manifest.shards, storage.list_folder(output)
    done = sum(sidecar_name(s.file, rule.fingerprint) in there for s in shards)
    context = ContextRule.from_json(rule.context)
    return "\n".join(
        [
            "dry run: nothing was written",
            f"  dataset         {format_plural(len(shards), 'shard')}, "
            f"{format_count(manifest.totals['num_teacher_tokens'])} teacher tokens in "
            f"{format_plural(manifest.totals['num_documents'], 'document')}",
            f"  teacher         {_describe_engine(rule)}; its scores are "
            f"{score_manifest_name(rule.fingerprint)}, {format_plural(done, 'sidecar')} there",
            *([f"  where           {rule.where}"] if rule.where else []),
            f"  context         {_describe_context(context)}",
            f"  disk            {format_bytes(estimate_disk(output, manifest, rule.fingerprint))}"
            f"{describe_room(output)}",
            "  time            --limit 100 tries a hundred documents and says",
        ]
    )


def summarise(scores: ScoreManifest, run: Mapping[str, Any], *, output: str) -> str:
    """Return the lines that end a run."""
    sidecars = scores.sidecars
    num_tokens = sum(record.num_tokens for record in sidecars)
    num_losses = sum(record.num_losses for record in sidecars)
    num_bytes = sum(record.num_bytes for record in sidecars)
    num_split = sum(record.num_split_documents for record in sidecars)
    mean = sum(record.loss_sum for record in sidecars) / max(1, num_losses)
    seconds = max(run["elapsed_seconds"], 1e-9)
    context = _describe_context(ContextRule.from_json(scores.rule.context))
    path = storage.join(output, score_manifest_name(scores.rule.fingerprint))
    lines = [
        f"scored {format_plural(run['num_documents'], 'document')} in {format_duration(seconds)}: "
        f"{format_short(run['num_scored_tokens'] / seconds)} teacher tokens/s",
        f"  teacher tokens  {format_count(num_tokens)}, mean loss {mean:.3f} nats",
        f"  context         {context}; {format_plural(num_split, 'document')} split",
        f"  sidecars        {len(sidecars)}, {format_bytes(num_bytes)}, "
        f"{num_bytes / max(1, num_tokens):.3f} bytes a teacher token",
        *_describe_work(scores.rule, run),
    ]
    if scores.rule.where:
        lines.append(f"  where           {scores.rule.where}: other documents have no losses")
    if run["reuse"]:
        lines.append(
            f"  reused          {format_plural(run['num_known_documents'], 'document')}, the other "
            f"{format_count(run['num_documents'])} computed: {', '.join(run['reuse'])}"
        )
    if run["num_reused_shards"]:
        lines.append(f"  resumed         {run['num_reused_shards']} shards were taken over")
    return "\n".join([*lines, f"next: train with --stored-losses {path}"])


def _describe_work(rule: TeacherRule, run: Mapping[str, Any]) -> list[str]:
    """Return what the losses cost, of what their engine tells."""
    if rule.engine is not None:
        asked = ""
        if run["num_requests"]:
            asked = (
                f"; {format_plural(run['num_requests'], 'request')}, {run['num_retries']} of them "
                "asked again"
            )
        return [f"  engine          {_describe_engine(rule)}{asked}"]
    padding = format_share(run["num_places"] - run["num_placed_tokens"], run["num_places"])
    rate = run["num_operations"] / max(run["ideal_seconds"], 1e-9)
    return [
        f"  padding         {padding}",
        f"  arithmetic      {format_share(run['ideal_seconds'], run['scoring_seconds'])} of the "
        f"{format_short(rate)}FLOP/s that plain matrix products reach here ({rule.dtype})",
    ]


def _describe_context(rule: ContextRule) -> str:
    first = rule.first_token_id
    before = "nothing" if first is None else f"token {first}"
    return f"{rule.describe()}, {before} before a text"


def _describe_engine(rule: TeacherRule) -> str:
    return rule.dtype if rule.engine is None else f"{rule.dtype}, by {rule.engine.describe()}"
