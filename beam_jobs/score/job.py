"""Score one dataset: from what is asked for to the finished score manifest."""

import os
import time
from dataclasses import dataclass, replace
from functools import partial

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs import storage
from beam_jobs.errors import JobError
from beam_jobs.locks import hold_lock
from beam_jobs.running.clusters import require_cluster
from beam_jobs.running.progress import reset_progress, run_with_token_bar
from beam_jobs.running.run_options import RunOptions
from beam_jobs.running.runners import make_beam_options, make_runner, run_to_end
from beam_jobs.runs import LOCK_FILE, open_run, read_left_file, run_folder_of
from beam_jobs.score.disk import estimate_disk
from beam_jobs.score.options import ScoreOptions, own_options
from beam_jobs.score.reuse import list_reusable
from beam_jobs.score.steps import SUMMARY_FILE, ScoreJob, TeacherHandler, WriteScores
from beam_jobs.score.summary import describe_job, summarise
from beam_jobs.score.teachers import (
    find_finished,
    find_job_teacher,
    run_configuration,
    settle_dtype,
    teacher_rule,
)
from beam_jobs.shortages import require_disk
from beam_jobs.transforms import Gather, Spread
from pipeline.dataset.conventions import choose_conventions
from pipeline.dataset.files import open_dataset
from pipeline.dataset.selection import ChosenDocuments, require_documents, select_documents
from pipeline.scoring.sidecars import scored_lengths
from schemas.manifest import Manifest
from schemas.sidecar import ScoreManifest, score_manifest_name


@dataclass(frozen=True)
class _Prepared:
    """A job before it starts.

    Attributes:
        job: for its workers.
        manifest: the dataset's, with the conventions that were asked for.
        scored: the same with the counts of those documents only that are scored, to be told.
        beam_options: how it runs.
        reuse: datasets whose losses are taken over.
    """

    job: ScoreJob
    manifest: Manifest
    scored: Manifest
    beam_options: PipelineOptions
    reuse: tuple[str, ...]


def build_pipeline(pipeline: beam.Pipeline, num_shards: int, job: ScoreJob) -> None:
    """Describe the job: a shard an element, for whichever worker is free."""
    _ = (
        pipeline
        | "Shards" >> beam.Create([str(shard) for shard in range(num_shards)])
        | "SpreadShards" >> Spread()
        | "Score" >> RunInference(TeacherHandler(job)).with_output_types(str)
        | "GatherShards" >> Gather()
        | "WriteScores" >> beam.ParDo(WriteScores(job)).with_output_types(str)
    )


def score(options: ScoreOptions) -> ScoreManifest | None:
    """Score a dataset, or return the scores where they are finished already.

    Returns:
        The score manifest; None of a trial (`limit`) and a dry run, which write nothing.

    Raises:
        ValueError: the dataset, the teacher or an option can't be used.
        JobError: the Beam job failed.

    Example:
        >>> options = ScoreOptions("aligned", "models/teacher", seq_length=2048)
        >>> score(options).source  # doctest: +SKIP
        'models/teacher'
    """
    clock = time.monotonic()
    prepared = _prepare(options)
    job, manifest, scored = prepared.job, prepared.manifest, prepared.scored
    if options.dry_run:
        print(describe_job(job.output, scored, job.rule))
        return None
    if options.limit is not None:
        from beam_jobs.score.trial import try_teacher

        num_tokens = scored.totals["num_teacher_tokens"]
        print(try_teacher(job, limit=options.limit, num_tokens=num_tokens))
        return None
    finished = find_finished(job.output, manifest, job.rule)
    if finished is not None:
        name = score_manifest_name(job.rule.fingerprint)
        options.run.say(
            f"{name} is finished: the same teacher, rule and data made it; nothing to do"
        )
        return finished
    need = estimate_disk(job.output, scored, job.rule.fingerprint)
    require_disk(job.output, need, ample=1.05)
    return _run(prepared, options.run, clock)


def _prepare(options: ScoreOptions) -> _Prepared:
    """Return what the job is, checked as far as it can be before it runs."""
    started = time.time()
    beam_options = make_beam_options(
        options.beam_arguments, run=options.run, command="score", own=own_options()
    )
    places = {"the dataset": [options.dataset], "--reuse": list(options.reuse or ())}
    if os.path.exists(options.teacher):
        places["--teacher"] = [options.teacher]
    require_cluster(beam_options, places)
    options = replace(
        options,
        dataset=storage.absolute(options.dataset),
        reuse=tuple(map(storage.absolute, options.reuse or ())),
    )
    FileSystems.set_options(beam_options)
    dataset = open_dataset(options.dataset)
    selection = select_documents(dataset, options.where)
    manifest = choose_conventions(
        dataset,
        student_bos=options.student_bos,
        student_eos=options.student_eos,
        teacher_context=options.teacher_context,
    )
    teacher = find_job_teacher(options, manifest)
    options = settle_dtype(options, manifest, teacher)
    rule = teacher_rule(options, manifest, teacher)
    job = ScoreJob(
        output=options.dataset,
        run_folder=run_folder_of(options.dataset, run_configuration(rule, manifest)),
        dataset=manifest.fingerprint,
        source=teacher.source,
        files=options.teacher,
        rule=rule,
        settings=teacher.settings,
        allow_untrained=options.allow_untrained_teacher,
        started=started,
    )
    scored = _count_scored(selection, manifest)
    return _Prepared(job, manifest, scored, beam_options, options.reuse or ())


def _count_scored(selection: ChosenDocuments, manifest: Manifest) -> Manifest:
    """Return a manifest whose shards have as many documents and tokens as are scored.

    Raises:
        WhereError: that is none.
    """
    if not selection.where:
        return manifest
    records = []
    for number, record in enumerate(manifest.shards):
        index, kept = selection.read(number, with_removed=True)
        num_documents = len(index) if kept is None else int(kept.sum())
        num_tokens = int(scored_lengths(index, kept).sum())
        records.append(replace(record, num_documents=num_documents, num_teacher_tokens=num_tokens))
    require_documents(sum(record.num_documents for record in records), selection)
    return replace(manifest, shards=tuple(records))


def _run(prepared: _Prepared, run: RunOptions, clock: float) -> ScoreManifest:
    """Run the job under its lock, and say what it did."""
    job, manifest = prepared.job, prepared.manifest
    with hold_lock(storage.join(job.run_folder, LOCK_FILE), job.output):
        open_run(job.run_folder, run_configuration(job.rule, manifest))
        reuses = list_reusable(prepared.reuse, job.rule, job.run_folder, run)
        job = replace(job, reuses=reuses)
        run_job(job, prepared.beam_options, prepared.scored, run=run)
        scores = find_finished(job.output, manifest, job.rule)
        if scores is None:
            raise JobError("the job ended, but its sidecars are gone: was the dataset removed?")
        summary = read_left_file(storage.join(job.run_folder, SUMMARY_FILE))
        summary["reuse"] = prepared.reuse
        summary["elapsed_seconds"] = time.monotonic() - clock  # whatever the other was set to
    storage.remove_folder(job.run_folder)
    run.say(summarise(scores, summary, output=job.output))
    return scores


def run_job(
    job: ScoreJob, beam_options: PipelineOptions, scored: Manifest, *, run: RunOptions
) -> None:
    """Run the pipeline to its end.

    Raises:
        JobError: with the cause, and where the traceback is.
    """
    reset_progress(job.run_folder)
    pipeline = beam.Pipeline(runner=make_runner(beam_options), options=beam_options)
    build_pipeline(pipeline, len(scored.shards), job)
    num_tokens = scored.totals["num_teacher_tokens"]
    bar = partial(run_with_token_bar, job.run_folder, num_tokens=num_tokens, quiet=run.quiet)
    run_to_end(pipeline, job.run_folder, run=run, with_bar=bar)
