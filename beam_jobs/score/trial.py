"""`vocag score --dry-run`: a few documents at once, to see what all of them would take."""

import math
from collections.abc import Sequence

import numpy as np

from beam_jobs import storage
from beam_jobs.score.steps import ReadyTeacher
from beam_jobs.score.summary import describe_context, describe_engine, estimate_disk
from beam_jobs.shortages import describe_room
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_short,
)
from pipeline.scoring.engines.interface import Work
from schemas.manifest import ShardRecord
from schemas.sidecar import score_manifest_name, sidecar_name

TRIED_DOCUMENTS = 100


def describe_trial(teacher: ReadyTeacher, shards: Sequence[ShardRecord]) -> str:
    """Score the first documents here, write nothing; return what the job would do, in lines."""
    work, losses, counts, num_documents = _try(teacher)
    rule, folder = teacher.job.rule, teacher.job.dataset
    there = storage.list_folder(folder)
    done = sum(sidecar_name(shard.file, rule.fingerprint) in there for shard in shards)
    num_tokens = sum(shard.num_teacher_tokens for shard in shards)
    rate = len(losses) / max(work.seconds, 1e-9)
    mean = float(losses.mean()) if len(losses) else math.nan
    each, distributions = None, []
    if rule.distributions is not None and len(counts):
        stored, share = rule.distributions, float((counts > 0).mean())
        each = float(counts.mean()) * stored.entry_bytes + share * stored.draws_bytes
        where = f" at {share:.1%} of them" if stored.entropy_above else ""
        distributions = [
            f"  distributions   {stored.describe()}: {counts.mean() / max(share, 1e-9):.2f} a "
            f"position{where}, {3 + each:.1f} bytes a teacher token with its loss"
        ]
    num_bytes = estimate_disk(folder, shards, rule, each)
    return "\n".join(
        [
            "dry run: nothing was written",
            f"  dataset         {format_plural(len(shards), 'shard')}, {format_count(num_tokens)} "
            "teacher tokens in "
            f"{format_plural(sum(shard.num_documents for shard in shards), 'document')}",
            f"  teacher         {describe_engine(rule)}; its scores are "
            f"{score_manifest_name(rule.fingerprint)}, {format_plural(done, 'sidecar')} there",
            *([f"  where           {rule.where}"] if rule.where else []),
            f"  context         {describe_context(rule)}",
            *distributions,
            f"  disk            {format_bytes(num_bytes)}{describe_room(folder, num_bytes)}",
            f"  tried           {format_plural(num_documents, 'document')}, "
            f"{format_count(len(losses))} teacher tokens, in {format_duration(work.seconds)}: "
            f"{format_short(rate)} tokens/s, mean loss {mean:.3f} nats",
            f"  time            about {format_duration(num_tokens / max(rate, 1e-9))} in one "
            "process",
        ]
    )


def _try(teacher: ReadyTeacher) -> tuple[Work, np.ndarray, np.ndarray, int]:
    """Return what the first documents cost, their losses, their entries a position, how many."""
    work, parts, num_documents = Work(), [np.empty(0, np.float32)], 0
    counts = [np.empty(0, np.int64)]
    for number in range(len(teacher.documents.dataset.manifest.shards)):
        shard = teacher.shard(number)
        wanted = np.ones(len(shard.index), np.bool_) if shard.kept is None else shard.kept
        # True up to the limit, as many as there are.
        first = wanted & (np.cumsum(wanted) <= TRIED_DOCUMENTS - num_documents)
        pieces = shard.pieces.of_documents(first)
        tokens, names = shard.read_tokens(first), shard.index.document_id
        scored = teacher.engine.score(tokens, pieces, names=names)
        parts.append(scored.losses[~np.isnan(scored.losses)])
        if scored.top is not None:
            counts.append((scored.top.ids >= 0).sum(axis=1))
        work += scored.work
        num_documents += int(first.sum())
        if num_documents == TRIED_DOCUMENTS:
            break
    losses = np.concatenate(parts).astype(np.float64)
    return work, losses, np.concatenate(counts), num_documents
