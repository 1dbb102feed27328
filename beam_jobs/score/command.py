"""`python -m beam_jobs.score`: a teacher's losses of a dataset, once, beside its shards."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs import storage
from beam_jobs.clusters import require_cluster
from beam_jobs.errors import JobError, OptionsError
from beam_jobs.locks import hold_lock
from beam_jobs.progress import reset_progress, run_with_token_bar
from beam_jobs.run_options import RunOptions, configure_logging
from beam_jobs.runners import exit_status, make_beam_options, make_runner, run_to_end
from beam_jobs.runs import LOCK_FILE, open_run, run_folder_of
from beam_jobs.score.options import ScoreOptions, own_options, parse_options
from beam_jobs.score.steps import SUMMARY_FILE, ScoreJob, TeacherHandler, WriteScores
from beam_jobs.transforms import Gather, Spread
from pipeline.dataset.conventions import choose_conventions
from pipeline.dataset.files import open_dataset
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_share,
    format_short,
)
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.fit import require_tokenizer
from pipeline.scoring.teacher_files import TeacherFiles, find_teacher
from schemas.manifest import Manifest
from schemas.sidecar import (
    ScoreManifest,
    TeacherRule,
    decode_score_manifest,
    score_manifest_name,
)


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
        The score manifest; None of a trial (`limit`), which writes nothing.

    Raises:
        ValueError: the dataset, the teacher or an option can't be used.
        JobError: the Beam job failed.

    Example:
        >>> options = ScoreOptions("aligned", "models/teacher", seq_length=2048)
        >>> score(options).source  # doctest: +SKIP
        'models/teacher'
    """
    started, clock = time.time(), time.monotonic()
    beam_options = make_beam_options(
        options.beam_arguments, run=options.run, command="score", own=own_options()
    )
    places = {"the dataset": [options.output]}
    if os.path.exists(options.teacher):
        places["--teacher"] = [options.teacher]
    require_cluster(beam_options, places)
    options = replace(options, output=storage.absolute(options.output))
    FileSystems.set_options(beam_options)
    manifest = choose_conventions(
        open_dataset(options.output),
        student_bos=options.student_bos,
        student_eos=options.student_eos,
        teacher_context=options.teacher_context,
    )
    teacher = find_teacher(options.teacher)
    require_tokenizer(teacher.path, options.output, manifest, side="teacher")
    options = settle_dtype(options, manifest, teacher)
    rule = teacher_rule(options, manifest, teacher)
    finished = find_finished(options.output, manifest, rule)
    if finished is not None and options.limit is None:
        name = score_manifest_name(rule.fingerprint)
        options.run.say(
            f"{name} is finished: the same teacher, rule and data made it; nothing to do"
        )
        return finished
    configuration = _configuration(rule, manifest)
    job = ScoreJob(
        output=options.output,
        run_folder=run_folder_of(options.output, configuration),
        dataset=manifest.fingerprint,
        source=options.teacher,
        rule=rule,
        device=options.device,
        batch_tokens=options.batch_tokens,
        threads=options.threads,
        allow_untrained=options.allow_untrained_teacher,
        started=started,
    )
    if options.limit is not None:
        from beam_jobs.score.trial import try_teacher

        print(try_teacher(job, limit=options.limit))
        return None
    with hold_lock(storage.join(job.run_folder, LOCK_FILE), options.output):
        open_run(job.run_folder, configuration)
        run_job(job, beam_options, manifest, run=options.run)
        scores = find_finished(options.output, manifest, rule)
        if scores is None:
            raise JobError("the job ended, but its sidecars are gone: was the dataset removed?")
        run = json.loads(storage.read_bytes(storage.join(job.run_folder, SUMMARY_FILE)))
        run["elapsed_seconds"] = time.monotonic() - clock  # whatever the other clock was set to
    storage.remove_folder(job.run_folder)
    options.run.say(summarise(scores, run, output=options.output))
    return scores


def settle_dtype(options: ScoreOptions, manifest: Manifest, teacher: TeacherFiles) -> ScoreOptions:
    """Return the options with a dtype: the one given, of an earlier run, or the fastest here.

    An earlier run's comes first, so that a job that goes on never starts anew in another.
    """
    if options.dtype:
        return options
    for dtype in ("bfloat16", "float32"):
        earlier = replace(options, dtype=dtype)
        rule = teacher_rule(earlier, manifest, teacher)
        folder = run_folder_of(options.output, _configuration(rule, manifest))
        if find_finished(options.output, manifest, rule) or storage.list_folder(folder):
            return earlier
    from pipeline.scoring.dtype_trial import bfloat16_speedup, default_dtype
    from pipeline.scoring.scorer import default_device

    device = options.device or default_device()
    chosen = default_dtype(device)
    reason = ""
    if device == "cpu":
        reason = (
            f": this CPU multiplies in bfloat16 {bfloat16_speedup():.1f} x as fast as in float32"
        )
    options.run.say(f"scoring in {chosen}{reason}; --dtype says otherwise")
    return replace(options, dtype=chosen)


def _configuration(rule: TeacherRule, manifest: Manifest) -> dict[str, str]:
    """Return what names a run."""
    return {"scores": rule.fingerprint, "dataset": manifest.fingerprint}


def teacher_rule(options: ScoreOptions, manifest: Manifest, teacher: TeacherFiles) -> TeacherRule:
    """Return what determines the losses.

    Raises:
        OptionsError: lengths or a stride that no rule can have.
    """
    try:
        context = ContextRule.of_dataset(
            manifest,
            seq_length=options.seq_length,
            teacher_seq_length=options.teacher_seq_length,
            stride=options.stride,
        )
    except ValueError as error:
        raise OptionsError(str(error)) from error
    return TeacherRule(
        weights_sha256=teacher.sha256,
        dtype=options.dtype,
        tokenizer_sha256=manifest.teacher.sha256,
        context=context.to_json(),
    )


def find_finished(output: str, manifest: Manifest, rule: TeacherRule) -> ScoreManifest | None:
    """Return the scores of a dataset by a teacher, None where they are not complete."""
    path = storage.join(output, score_manifest_name(rule.fingerprint))
    if storage.num_bytes_of(path) is None:
        return None
    try:
        scores = decode_score_manifest(storage.read_bytes(path), where=path)
    except ValueError:
        return None
    found = storage.list_folder(output)
    complete = all(found.get(record.file) == record.num_bytes for record in scores.sidecars)
    same = (scores.dataset, len(scores.sidecars)) == (manifest.fingerprint, len(manifest.shards))
    return scores if complete and same else None


def run_job(
    job: ScoreJob, beam_options: PipelineOptions, manifest: Manifest, *, run: RunOptions
) -> None:
    """Run the pipeline to its end.

    Raises:
        JobError: with the cause, and where the traceback is.
    """
    reset_progress(job.run_folder)
    pipeline = beam.Pipeline(runner=make_runner(beam_options), options=beam_options)
    build_pipeline(pipeline, len(manifest.shards), job)
    num_tokens = manifest.totals["num_teacher_tokens"]
    bar = partial(run_with_token_bar, job.run_folder, num_tokens=num_tokens, quiet=run.quiet)
    run_to_end(pipeline, job.run_folder, run=run, with_bar=bar)


def summarise(scores: ScoreManifest, run: Mapping[str, Any], *, output: str) -> str:
    """Return the lines that end a run."""
    sidecars = scores.sidecars
    num_tokens = sum(record.num_tokens for record in sidecars)
    num_losses = sum(record.num_losses for record in sidecars)
    num_bytes = sum(record.num_bytes for record in sidecars)
    num_split = sum(record.num_split_documents for record in sidecars)
    mean = sum(record.loss_sum for record in sidecars) / max(1, num_losses)
    seconds = max(run["elapsed_seconds"], 1e-9)
    padding = format_share(run["num_places"] - run["num_placed_tokens"], run["num_places"])
    rate = run["num_operations"] / max(run["ideal_seconds"], 1e-9)
    rule = ContextRule.from_json(scores.rule.context)
    context = f"{rule.describe()}, {_name(rule.first_token_id)} before a text"
    path = storage.join(output, score_manifest_name(scores.rule.fingerprint))
    lines = [
        f"scored {format_plural(run['num_documents'], 'document')} in {format_duration(seconds)}: "
        f"{format_short(run['num_scored_tokens'] / seconds)} teacher tokens/s",
        f"  teacher tokens  {format_count(num_tokens)}, mean loss {mean:.3f} nats",
        f"  context         {context}; {format_plural(num_split, 'document')} split",
        f"  sidecars        {len(sidecars)}, {format_bytes(num_bytes)}, "
        f"{num_bytes / max(1, num_tokens):.3f} bytes a teacher token",
        f"  padding         {padding}",
        f"  arithmetic      {format_share(run['ideal_seconds'], run['scoring_seconds'])} of the "
        f"{format_short(rate)}FLOP/s that plain matrix products reach here ({scores.rule.dtype})",
    ]
    if run["num_reused_shards"]:
        lines.append(f"  resumed         {run['num_reused_shards']} shards were taken over")
    return "\n".join([*lines, f"next: train with --stored-losses {path}"])


def _name(token_id: int | None) -> str:
    return "nothing" if token_id is None else f"token {token_id}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, see `exit_status`."""

    def work() -> None:
        options = parse_options(arguments)
        configure_logging("score", options.run)
        score(options)

    return exit_status("score", work)
