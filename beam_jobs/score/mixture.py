"""`vocag score` on a mixture: each of its datasets by the rules that rows of the mixture have."""

from dataclasses import replace
from typing import cast

from beam_jobs.score.job import score
from beam_jobs.score.options import Dtype, ScoreOptions
from pipeline.packing.opening import open_run
from pipeline.packing.reading import Reading
from schemas.sidecar import ScoreManifest


def score_mixture(options: ScoreOptions) -> list[ScoreManifest]:
    """Score every dataset of a mixture, one after another; those that are finished are kept.

    Args:
        options: `dataset` is the mixture's file.

    Returns:
        The score manifests; of a trial (`limit`) none.

    Raises:
        ValueError: a mixture whose datasets don't fit together, or what `score` refuses.
        JobError: a Beam job failed.

    Example:
        >>> options = ScoreOptions("mixture.toml", "models/teacher", seq_length=2048)
        >>> [scores.source for scores in score_mixture(options)]  # doctest: +SKIP
        ['models/teacher', 'models/teacher']
    """
    opened = open_run(
        Reading(
            path=options.dataset,
            student_bos=options.student_bos,
            student_eos=options.student_eos,
            teacher_context=options.teacher_context,
        )
    )
    if options.seq_length is not None:
        rules = opened.rules(
            seq_length=options.seq_length, teacher_seq_length=options.teacher_seq_length
        )
        # Rows of a mixture have one length, by which its datasets' documents are split.
        options = replace(options, teacher_seq_length=rules.teacher_seq_length)
    done: list[ScoreManifest] = []
    for entry in opened.mixture.datasets:
        options.run.say(f"{entry.name}: {entry.path}")
        own = replace(options, dataset=entry.path, where=entry.where)
        scores = score(own)
        if scores is not None:
            done.append(scores)
            # A machine may try dtypes only once: losses of one run are of one teacher.
            options = replace(options, dtype=cast(Dtype, scores.rule.dtype))
    return done
