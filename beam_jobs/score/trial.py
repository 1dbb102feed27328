"""`vocag score --limit N`: a few documents at once, to see what all of them would take."""

import math

import numpy as np

from beam_jobs.score.steps import ReadyTeacher, ScoreJob, TeacherHandler
from pipeline.drawing.formatting import format_count, format_duration, format_plural, format_short
from pipeline.scoring.engines.interface import Work
from pipeline.scoring.sidecars import read_teacher_tokens


def try_teacher(job: ScoreJob, *, limit: int, num_tokens: int) -> str:
    """Score the first documents here, write nothing, and return what was found, in lines.

    Args:
        job: as for the whole dataset.
        limit: documents.
        num_tokens: teacher tokens that the job would score.

    Raises:
        ValueError: as the whole job would.
    """
    teacher = TeacherHandler(job).load_model()
    work, losses, num_documents = Work(), 0.0, 0
    num_losses = 0
    for shard in range(len(teacher.dataset.manifest.shards)):
        if num_documents == limit:
            break
        part = _score_first(teacher, shard, limit - num_documents)
        num_documents += part[0]
        losses, num_losses = losses + part[1], num_losses + part[2]
        for name in ("num_tokens", "num_places", "num_operations", "seconds"):
            setattr(work, name, getattr(work, name) + getattr(part[3], name))
    rate = num_losses / max(work.seconds, 1e-9)
    mean = losses / num_losses if num_losses else math.nan
    return "\n".join(
        [
            f"tried {format_plural(num_documents, 'document')}, {format_count(num_losses)} teacher "
            f"tokens, in {format_duration(work.seconds)}: {format_short(rate)} tokens/s "
            f"({job.rule.dtype}), mean loss {mean:.3f} nats",
            f"all {format_short(num_tokens)} teacher tokens would take about "
            f"{format_duration(num_tokens / max(rate, 1e-9))} in one process; nothing was written: "
            "leave out --limit to score them",
        ]
    )


def _score_first(teacher: ReadyTeacher, shard: int, limit: int) -> tuple[int, float, int, Work]:
    """Return documents, sum of losses, number of losses, and work of a shard's first documents."""
    index = teacher.dataset.read_index(shard, with_names=True)
    pieces, kept = teacher.to_score(shard, index)
    wanted = np.ones(len(index), np.bool_) if kept is None else kept
    # True up to the limit, as many as there are.
    first = wanted & (np.cumsum(wanted) <= limit)
    tokens = read_teacher_tokens(teacher.dataset, shard, index, kept=first)
    scored = teacher.engine.score(tokens, pieces.of_documents(first), names=index.document_id)
    known = scored.losses[~np.isnan(scored.losses)].astype(np.float64)
    return int(first.sum()), float(known.sum()), len(known), scored.work
