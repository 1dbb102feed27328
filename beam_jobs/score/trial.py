"""`vocag score --limit N`: a few documents at once, to see what all of them would take."""

import math

import numpy as np

from beam_jobs.score.steps import ReadyTeacher
from pipeline.drawing.formatting import format_count, format_duration, format_plural, format_short
from pipeline.scoring.engines.interface import Work


def try_teacher(teacher: ReadyTeacher, *, limit: int, num_tokens: int) -> str:
    """Score the first documents here, write nothing, and return what was found, in lines.

    Args:
        teacher: as for the whole dataset.
        limit: documents.
        num_tokens: teacher tokens that the job would score.

    Raises:
        ValueError: as the whole job would.
    """
    work, parts, num_documents = Work(), [np.empty(0, np.float32)], 0
    for number in range(len(teacher.documents.dataset.manifest.shards)):
        shard = teacher.shard(number)
        wanted = np.ones(len(shard.index), np.bool_) if shard.kept is None else shard.kept
        # True up to the limit, as many as there are.
        first = wanted & (np.cumsum(wanted) <= limit - num_documents)
        pieces = shard.pieces.of_documents(first)
        tokens, names = shard.read_tokens(first), shard.index.document_id
        scored = teacher.engine.score(tokens, pieces, names=names)
        parts.append(scored.losses[~np.isnan(scored.losses)])
        work += scored.work
        num_documents += int(first.sum())
        if num_documents == limit:
            break
    losses = np.concatenate(parts).astype(np.float64)
    rate = len(losses) / max(work.seconds, 1e-9)
    mean = float(losses.mean()) if len(losses) else math.nan
    return "\n".join(
        [
            f"tried {format_plural(num_documents, 'document')}, {format_count(len(losses))} "
            f"teacher tokens, in {format_duration(work.seconds)}: {format_short(rate)} tokens/s "
            f"({teacher.job.rule.dtype}), mean loss {mean:.3f} nats",
            f"all {format_short(num_tokens)} teacher tokens would take about "
            f"{format_duration(num_tokens / max(rate, 1e-9))} in one process; nothing was written: "
            "leave out --limit to score them",
        ]
    )
