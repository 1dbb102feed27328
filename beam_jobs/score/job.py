"""Score the datasets of a run."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs import storage
from beam_jobs.hub_copies import HUB, input_here, output_here
from beam_jobs.job_errors import JobError, OptionsError
from beam_jobs.locks import hold_lock
from beam_jobs.resuming import (
    CONFIGURATION_FILE,
    RUN_PREFIX,
    SUMMARY_FILE,
    read_left_file,
    run_folder_of,
    start_run,
)
from beam_jobs.running.clusters import require_cluster
from beam_jobs.running.job_progress import scoring_stage
from beam_jobs.running.run_options import RunOptions
from beam_jobs.running.runners import make_beam_options, run_pipeline
from beam_jobs.running.transforms import Gather, Spread
from beam_jobs.score.options import ScoreOptions
from beam_jobs.score.reuse import find_reusable, save_reusable
from beam_jobs.score.steps import (
    ReadyTeacher,
    ScoreJob,
    TeacherHandler,
    WorkDone,
    complete_document_scores,
    write_scores,
)
from beam_jobs.score.summary import describe_trial, estimate_disk, learned_share, summarise
from beam_jobs.score.teachers import (
    JobTeacher,
    find_finished,
    find_job_teacher,
    read_scores,
    run_configuration,
)
from beam_jobs.shortages import require_disk
from pipeline.command_line.option_parsing import option_names
from pipeline.dataset.chosen_documents import (
    ChosenDocuments,
    require_documents,
    require_learned,
)
from pipeline.dataset.dataset_reading import find_generation, read_manifest
from pipeline.drawing.formatting import format_plural
from pipeline.packing.opening import OpenedDataset, open_run
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from schemas.document_score_table import document_scores_name
from schemas.manifest import ShardRecord
from schemas.records import read_record
from schemas.sidecar import ScoreManifest, TeacherRule, score_manifest_name


def score(options: ScoreOptions) -> list[ScoreManifest]:
    """Score the datasets of a run, one after another; finished ones are kept.

    Return the score manifests in the mixture's order; none for a dry run.

    Raises:
        ValueError: a dataset, the teacher or an option can't be used.
        JobError: a Beam job failed.

    Example:
        >>> options = ScoreOptions(Reading("aligned"), "models/teacher", seq_length=2048)
        >>> [scores.source for scores in score(options)]  # doctest: +SKIP
        ['models/teacher']
    """
    path, uploads = options.dataset.path, not options.dry_run
    options = replace(options, reuse=tuple(map(input_here, options.reuse or ())) or None)
    with output_here(path, options.run.say, uploads=uploads) as location:
        return _score(replace(options, dataset=replace(options.dataset, path=location)))


def _score(options: ScoreOptions) -> list[ScoreManifest]:
    beam_options = make_beam_options(
        options.beam_arguments, run=options.run, command="score", own=option_names(ScoreOptions)
    )
    places = {"the dataset": [options.dataset.path], "--reuse": list(options.reuse or ())}
    if os.path.exists(options.teacher):
        places["--teacher"] = [options.teacher]
    require_cluster(beam_options, places)
    FileSystems.set_options(beam_options)
    reading = replace(options.dataset, path=storage.absolute(options.dataset.path))
    opened = open_run(reading)
    rules = PackingRules.of_dataset(
        opened.manifest,
        seq_length=options.seq_length,
        teacher_seq_length=options.teacher_seq_length,
    )
    context = ContextRule.of_rows(rules)
    teacher = find_job_teacher(options, opened.dataset, context)
    done = []
    for each in opened.datasets:
        if each.dataset.location.startswith(HUB):
            raise OptionsError(f"{each.dataset.location} is scored alone, not as part of a mixture")
        if each.entry.name:
            options.run.say(f"{each.entry.name}: {each.dataset.location}")
        job = make_job(options, each, teacher, context)
        scores = _score_dataset(options, each, job, beam_options)
        if scores is not None:
            done.append(scores)
    return done


def make_job(
    options: ScoreOptions, opened: OpenedDataset, teacher: JobTeacher, context: ContextRule
) -> ScoreJob:
    """The workers' job for one dataset."""
    dataset = opened.dataset
    is_chats = dataset.manifest.chats is not None
    if options.learned_only and not is_chats:
        raise OptionsError(
            f"--learned-only: {dataset.location} holds texts, of which every token is learned"
        )
    rule = TeacherRule(
        weights_sha256=teacher.weights_sha256,
        dtype=teacher.dtype,
        tokenizer_sha256=dataset.manifest.teacher.sha256,
        context=context.to_json(),
        engine=teacher.engine,
        where=opened.documents.where,
        distributions=options.top.rule(dataset.manifest.teacher.vocab_size),
        learned_only=is_chats and options.learned_only is not False,
    )
    folder = storage.absolute(dataset.location)
    return ScoreJob(
        dataset=folder,
        fingerprint=opened.fingerprint,
        run_folder=run_folder_of(folder, run_configuration(rule, opened.fingerprint)),
        source=teacher.source,
        files=options.teacher,
        rule=rule,
        settings=options.here if teacher.engine is None else options.served,
        handshake=teacher.handshake,
        allow_untrained=options.allow_untrained_teacher,
        started=time.time(),
    )


def build_pipeline(pipeline: beam.Pipeline, num_shards: int, job: ScoreJob) -> None:
    """Describe the job: one shard per element, for any free worker."""
    _ = (
        pipeline
        | "Shards" >> beam.Create([str(shard) for shard in range(num_shards)])
        | "SpreadShards" >> Spread()
        | "Score" >> RunInference(TeacherHandler(job)).with_output_types(str)
        | "GatherShards" >> Gather()
        | "WriteScores" >> beam.Map(write_scores, job).with_output_types(str)
    )


def _score_dataset(
    options: ScoreOptions, opened: OpenedDataset, job: ScoreJob, beam_options: PipelineOptions
) -> ScoreManifest | None:
    run, reuse = options.run, tuple(map(storage.absolute, options.reuse or ()))
    documents, began = opened.documents, time.monotonic()
    if job.rule.learned_only:
        require_learned(documents, "num_learned_teacher_tokens")
    shards = _count_scored(documents)
    if options.dry_run:
        known = find_reusable(reuse, job.rule, run)
        print(describe_trial(ReadyTeacher(job, documents), shards))
        if known:
            print("  reuse           losses that --reuse takes over aren't counted: it takes less")
        return None
    num_tokens = sum(shard.num_teacher_tokens for shard in shards)
    finished = find_finished(job.dataset, opened.dataset.manifest, job.rule)
    if finished is not None:
        name = score_manifest_name(job.rule.fingerprint)
        run.say(f"{name} is finished: the same teacher, rule and data made it; nothing to do")
        _complete(run, job, documents, finished)
        return finished
    learned = learned_share(documents, job.rule)
    require_disk(job.dataset, estimate_disk(job.dataset, shards, job.rule, learned=learned))
    with _hold_scores(job):
        start_run(job.run_folder, run_configuration(job.rule, job.fingerprint))
        reusable = find_reusable(reuse, job.rule, run)
        if reusable:
            save_reusable(reusable, job.run_folder, run)
        reusing = replace(job, reuses=bool(reusable))
        build = partial(build_pipeline, num_shards=len(shards), job=reusing)
        stage = partial(scoring_stage, num_tokens=num_tokens)
        run_pipeline(build, beam_options, job.run_folder, run=run, stage=stage)
        scores = find_finished(job.dataset, opened.dataset.manifest, job.rule)
        if scores is None:
            raise JobError("the job ended, but its sidecars are gone: was the dataset removed?")
        summary = storage.read_bytes(storage.join(job.run_folder, SUMMARY_FILE))
        _remove_runs(job)
    run.say(
        summarise(
            scores,
            read_record(summary, WorkDone),
            dataset=job.dataset,
            reuse=reuse,
            elapsed_seconds=time.monotonic() - began,
        )
    )
    return scores


def _complete(
    run: RunOptions, job: ScoreJob, documents: ChosenDocuments, scores: ScoreManifest
) -> None:
    there, number = storage.list_folder(job.dataset), 0
    is_whole = all(document_scores_name(record.file) in there for record in scores.sidecars)
    if is_whole and _lock_name(job) not in there and not any(_find_runs(job)):
        return
    with _hold_scores(job):
        if not is_whole:
            start_run(job.run_folder, run_configuration(job.rule, job.fingerprint))
            number = complete_document_scores(job, documents, scores)
        _remove_runs(job)
    if number:
        run.say(f"{format_plural(number, 'table')} of documents' scores made from the losses")


def _remove_runs(job: ScoreJob) -> None:
    """Remove this job's folder, and those of killed ones of the same teacher; needs its lock."""
    for folder in _find_runs(job):
        storage.remove_folder(folder)


def _find_runs(job: ScoreJob) -> Iterator[str]:
    for folder in storage.list_folders(job.dataset, RUN_PREFIX):
        scores = None
        with suppress(OptionsError, OSError):  # another teacher's, which is just removed
            scores = read_left_file(storage.join(folder, CONFIGURATION_FILE)).get("scores")
        if folder == job.run_folder or scores == job.rule.fingerprint:
            yield folder


@contextmanager
def _hold_scores(job: ScoreJob) -> Iterator[None]:
    """Hold a teacher's scores of a dataset, whichever generation a job reads.

    OptionsError if a job that ended just now left those of a later one, which serve this one, too.
    """
    with hold_lock(storage.join(job.dataset, _lock_name(job)), job.dataset):
        there = read_scores(job.dataset, job.rule)
        if there is not None and there.dataset != job.fingerprint:
            newest = read_manifest(job.dataset)
            found, own = (find_generation(newest, f) for f in (there.dataset, job.fingerprint))
            if found is not None and own is not None and found > own:
                raise OptionsError(
                    f"another job has scored generation {found} of {job.dataset} since this one "
                    f"read generation {own}: run the same command again"
                )
        yield


def _lock_name(job: ScoreJob) -> str:
    return f"{RUN_PREFIX}scores-{job.rule.fingerprint[:16]}.lock"


def _count_scored(documents: ChosenDocuments) -> tuple[ShardRecord, ...]:
    """Count shards' scored documents and tokens; at least one document."""
    shards = documents.dataset.manifest.shards
    if not documents.where:
        return shards
    counted = []
    for number, record in enumerate(shards):
        index, kept = documents.read(number, with_removed=True)
        if kept is not None:  # else all match the condition
            num_tokens = int(index.num_teacher_tokens[kept].sum())
            record = replace(record, num_documents=int(kept.sum()), num_teacher_tokens=num_tokens)
        counted.append(record)
    require_documents(sum(record.num_documents for record in counted), documents)
    return tuple(counted)
