"""Messages of `vocag score`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from beam_jobs import storage
from beam_jobs.score.steps import ReadyTeacher, WorkDone
from beam_jobs.shortages import describe_room
from pipeline.command_line.pasted import pasted
from pipeline.dataset.chosen_documents import ChosenDocuments
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_share,
    format_short,
)
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.interface import Work
from schemas.distribution_rule import DistributionRule
from schemas.manifest import ShardRecord
from schemas.sidecar import ScoreManifest, TeacherRule, score_manifest_name, sidecar_name

TRIED_DOCUMENTS = 100

_LOSS_BYTES, _START_BYTES, _ENTRY_START_BYTES = 2, 4, 8
_HEADER_BYTES, _RECORD_BYTES, _ENTRY_HEADER_BYTES = 400, 600, 600
"""Of a sidecar: its header of safetensors with the metadata, and its share of the manifest; and
what entries add to both."""
_TABLE_BYTES, _ROW_BYTES = 2130, 24
"""Of an empty table of documents' scores, and of a document's row with its id."""


def estimate_disk(
    dataset: str,
    shards: Sequence[ShardRecord],
    rule: TeacherRule,
    bytes_per_position: float | None = None,
    *,
    learned: float = 1.0,
) -> int:
    """Estimate the bytes a job adds to a dataset's disk, without existing sidecars.

    To a percent, of chats to some. `shards` have the scored numbers of documents and tokens.
    `bytes_per_position` None means the most that the rule allows; `learned` is the share of tokens
    whose losses are stored.
    """
    there = storage.list_folder(dataset)
    of_token, of_document, of_shard = _sizes(rule.distributions, bytes_per_position, learned)
    left = [s for s in shards if not there.get(sidecar_name(s.file, rule.fingerprint))]
    return round(
        of_token * sum(shard.num_teacher_tokens for shard in left)
        + of_document * sum(shard.num_documents + 1 for shard in left)
        + of_shard * len(left)
    )


def describe_trial(teacher: ReadyTeacher, shards: Sequence[ShardRecord]) -> str:
    """Score the first documents without writing; estimate the job from them."""
    tried = _try(teacher)
    losses, counts = tried.losses, tried.counts
    rule, folder = teacher.job.rule, teacher.job.dataset
    there = storage.list_folder(folder)
    done = sum(sidecar_name(shard.file, rule.fingerprint) in there for shard in shards)
    num_tokens = sum(shard.num_teacher_tokens for shard in shards)
    rate = tried.num_tokens / max(tried.work.seconds, 1e-9)
    learned = learned_share(teacher.documents, rule)
    mean = float(losses.mean()) if len(losses) else math.nan
    each, distributions = None, []
    if rule.distributions is not None and len(counts):
        stored, share = rule.distributions, float((counts > 0).mean())
        each = float(counts.mean()) * stored.entry_bytes + share * stored.draws_bytes
        where = f" at {share:.1%} of them" if stored.entropy_above else ""
        distributions = [
            f"  distributions   {stored.describe()}: {counts.mean() / max(share, 1e-9):.2f} a "
            f"position{where}, {1 + learned * _LOSS_BYTES + each:.1f} bytes a teacher token with "
            "its loss"
        ]
    num_bytes = estimate_disk(folder, shards, rule, each, learned=learned)
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
            f"  tried           {format_plural(tried.num_documents, 'document')}, "
            f"{format_count(tried.num_tokens)} teacher tokens, in "
            f"{format_duration(tried.work.seconds)}: {format_short(rate)} tokens/s, mean loss "
            f"{mean:.3f} nats",
            f"  time            about {format_duration(num_tokens / max(rate, 1e-9))} in one "
            "process",
        ]
    )


def learned_share(documents: ChosenDocuments, rule: TeacherRule) -> float:
    """Return the share of teacher tokens whose losses are stored: of chats, what is learned."""
    if not rule.learned_only:
        return 1.0
    num_learned = num_tokens = 0
    for number in range(len(documents.dataset.manifest.shards)):
        index, kept = documents.read(number, with_removed=True)
        own = slice(None) if kept is None else kept
        num_learned += int(index.chats["num_learned_teacher_tokens"][own].sum())
        num_tokens += int(index.num_teacher_tokens[own].sum())
    return num_learned / max(1, num_tokens)


class _Tried(NamedTuple):
    """What the first documents took: their losses to store, and entries at each position."""

    work: Work
    num_tokens: int
    losses: np.ndarray
    counts: np.ndarray
    num_documents: int


def _try(teacher: ReadyTeacher) -> _Tried:
    work, parts, num_documents = Work(), [np.empty(0, np.float32)], 0
    counts, num_tokens = [np.empty(0, np.int64)], 0
    for number in range(len(teacher.documents.dataset.manifest.shards)):
        shard = teacher.shard(number)
        wanted = np.ones(len(shard.index), np.bool_) if shard.kept is None else shard.kept
        # True up to the limit, as many as there are.
        first = wanted & (np.cumsum(wanted) <= TRIED_DOCUMENTS - num_documents)
        pieces = shard.pieces.of_documents(first)
        tokens, names = shard.read_tokens(first), shard.index.document_id
        scored = teacher.engine.score(tokens, pieces, names=names)
        is_scored = ~np.isnan(scored.losses)
        num_tokens += int(is_scored.sum())
        if teacher.job.rule.learned_only and tokens.learned is not None:
            is_scored &= tokens.learned
            if scored.top is not None:
                scored.top.ids[tokens.unlearned_positions()] = -1
        parts.append(scored.losses[is_scored])
        if scored.top is not None:
            counts.append((scored.top.ids >= 0).sum(axis=1))
        work += scored.work
        num_documents += int(first.sum())
        if num_documents == TRIED_DOCUMENTS:
            break
    losses = np.concatenate(parts).astype(np.float64)
    return _Tried(work, num_tokens, losses, np.concatenate(counts), num_documents)


def _sizes(
    rule: DistributionRule | None, bytes_per_position: float | None, learned: float
) -> tuple[float, float, int]:
    """Bytes per token, per document and per shard."""
    of_document = float(_START_BYTES + _ROW_BYTES)
    of_shard = _HEADER_BYTES + _RECORD_BYTES + _TABLE_BYTES
    if rule is None:
        return learned * _LOSS_BYTES, of_document, of_shard
    if bytes_per_position is None:
        bytes_per_position = learned * (rule.top_k * rule.entry_bytes + rule.draws_bytes)
    of_position = 1 + bytes_per_position
    # Nothing is learned at the position after a text.
    of_document += _ENTRY_START_BYTES + (of_position if learned == 1 else 1)
    return learned * _LOSS_BYTES + of_position, of_document, of_shard + _ENTRY_HEADER_BYTES


def summarise(
    scores: ScoreManifest,
    run: WorkDone,
    *,
    dataset: str,
    reuse: Sequence[str],
    elapsed_seconds: float,
) -> str:
    """A run's last lines."""
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
        *_describe_entries(scores),
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
        resumed = format_plural(run.num_resumed_shards, "shard")
        lines.append(f"  resumed         {resumed} taken over")
    return "\n".join([*lines, f"next: train with --stored-losses {pasted(path)}"])


def _describe_entries(scores: ScoreManifest) -> list[str]:
    rule = scores.rule.distributions
    if rule is None:
        return []
    entries = [record.entries for record in scores.sidecars if record.entries]
    num_positions = max(1, sum(each.num_positions for each in entries))
    num_entries = sum(each.num_entries for each in entries)
    where = f", at {format_count(num_positions)} positions" if rule.entropy_above else ""
    mass = sum(each.mass_sum for each in entries) / num_positions
    return [
        f"  distributions   {rule.describe()}: {num_entries / num_positions:.2f} a position on "
        f"average, which hold {mass:.4f} of the mass{where}"
    ]


def _describe_work(rule: TeacherRule, run: WorkDone) -> list[str]:
    work = run.work
    if rule.engine is not None:
        return [f"  engine          {describe_engine(rule)}"]
    padding = format_share(work.num_places - work.num_tokens, work.num_places)
    return [f"  padding         {padding}"]


def describe_context(rule: TeacherRule) -> str:
    """Describe where texts are split, and what precedes them."""
    context = ContextRule.from_json(rule.context)
    first = context.first_token_id
    return f"{context.describe()}, {'nothing' if first is None else f'token {first}'} before a text"


def describe_engine(rule: TeacherRule) -> str:
    """Describe the teacher's dtype and engine."""
    return rule.dtype if rule.engine is None else f"{rule.dtype}, by {rule.engine.describe()}"
