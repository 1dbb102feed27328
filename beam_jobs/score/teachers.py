"""Whose losses a job stores: its files or its name, its dtype, and what runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256

from beam_jobs import storage
from beam_jobs.errors import OptionsError
from beam_jobs.runs import run_folder_of
from beam_jobs.score.engine_options import api_key
from beam_jobs.score.options import Dtype, ScoreOptions
from pipeline.dataset.files import Dataset
from pipeline.models.fit import require_tokenizer
from pipeline.models.teacher_files import find_teacher
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.settings import EngineSettings, TransformersSettings
from schemas.manifest import Manifest
from schemas.sidecar import (
    EngineRecord,
    ScoreManifest,
    TeacherRule,
    decode_score_manifest,
    score_manifest_name,
)


@dataclass(frozen=True)
class JobTeacher:
    """A teacher and what runs it.

    Attributes:
        source: what the user named; scores are found by it.
        weights_sha256: over its files, or over its name where they are out of sight.
        engine: of the rule; None for transformers.
        settings: of the engine.
    """

    source: str
    weights_sha256: str
    engine: EngineRecord | None
    settings: EngineSettings


def find_job_teacher(options: ScoreOptions, manifest: Manifest) -> JobTeacher:
    """Return the teacher that a job is asked for, checked as far as it can be before it runs.

    Raises:
        ValueError: no such teacher, or not the dataset's.
        EngineError: servers that can't be asked.
    """
    if options.engine.name == "openai":
        return _served(options, manifest)
    files = find_teacher(options.teacher)
    require_tokenizer(files.path, Dataset(options.dataset, manifest), side="teacher")
    settings = TransformersSettings(options.device, options.batch_tokens, options.threads)
    return JobTeacher(options.teacher, files.sha256, None, settings)


def settle_dtype(options: ScoreOptions, manifest: Manifest, teacher: JobTeacher) -> ScoreOptions:
    """Return the options with a dtype: the one given, of an earlier run, or the fastest here.

    An earlier run's comes first, so that a job that goes on never starts anew in another.

    Raises:
        OptionsError: none is given, and it can't be known.
    """
    if options.dtype:
        return options
    if teacher.engine is not None:
        raise OptionsError(
            f"--engine {options.engine.name} needs --dtype: what the teacher computes in, which is "
            "part of its scores' identity"
        )
    tried: tuple[Dtype, ...] = ("bfloat16", "float32")
    for dtype in tried:
        earlier = replace(options, dtype=dtype)
        rule = teacher_rule(earlier, manifest, teacher)
        folder = run_folder_of(options.dataset, run_configuration(rule, manifest))
        if find_finished(options.dataset, manifest, rule) or storage.list_folder(folder):
            return earlier
    from pipeline.models.dtype_trial import bfloat16_speedup, default_dtype
    from pipeline.scoring.engines.transformers import default_device

    device = options.device or default_device()
    chosen: Dtype = default_dtype(device)
    reason = ""
    if device == "cpu":
        reason = (
            f": this CPU multiplies in bfloat16 {bfloat16_speedup():.1f} x as fast as in float32"
        )
    options.run.say(f"scoring in {chosen}{reason}; --dtype says otherwise")
    return replace(options, dtype=chosen)


def teacher_rule(options: ScoreOptions, manifest: Manifest, teacher: JobTeacher) -> TeacherRule:
    """Return what determines the losses.

    Raises:
        OptionsError: lengths or a stride that no rule can have.
    """
    return TeacherRule(
        weights_sha256=teacher.weights_sha256,
        dtype=options.dtype,
        tokenizer_sha256=manifest.teacher.sha256,
        context=context_rule(options, manifest).to_json(),
        engine=teacher.engine,
        where=options.where.strip(),
    )


def context_rule(options: ScoreOptions, manifest: Manifest) -> ContextRule:
    """Return with which contexts tokens are scored.

    Raises:
        OptionsError: lengths or a stride that no rule can have.
    """
    try:
        return ContextRule.of_dataset(
            manifest,
            seq_length=options.seq_length,
            teacher_seq_length=options.teacher_seq_length,
            stride=options.stride,
        )
    except ValueError as error:
        raise OptionsError(str(error)) from error


def run_configuration(rule: TeacherRule, manifest: Manifest) -> dict[str, str]:
    """Return what names a run."""
    return {"scores": rule.fingerprint, "dataset": manifest.fingerprint}


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


def _served(options: ScoreOptions, manifest: Manifest) -> JobTeacher:
    """Return a teacher behind servers, each of which has answered."""
    from pipeline.scoring.engines.openai import connect

    chosen = options.engine
    source, weights_of = options.teacher or chosen.model, "name"
    digest = sha256(f"served:{chosen.model}".encode()).hexdigest()
    if options.teacher:
        files = find_teacher(options.teacher)
        require_tokenizer(files.path, Dataset(options.dataset, manifest), side="teacher")
        digest, weights_of = files.sha256, "files"
    settings = chosen.served_settings()
    engine = connect(
        settings,
        context_rule(options, manifest),
        dataset=Dataset(options.dataset, manifest),
        api_key=api_key(),
    )
    told = engine.info.version
    if chosen.engine_version and told and chosen.engine_version != told:
        raise OptionsError(
            f"--engine-version {chosen.engine_version}, but {settings.endpoints[0]} says {told}: "
            "leave the option out"
        )
    version = told or chosen.engine_version
    if not version:
        raise OptionsError(
            f"{settings.endpoints[0]} does not tell its version, which is part of its scores' "
            "identity: state it with --engine-version"
        )
    record = EngineRecord(
        "openai",
        engine.info.kind,
        version,
        chosen.quantization,
        chosen.model,
        "files" if weights_of == "files" else "name",
    )
    options.run.say(
        f"{len(settings.endpoints)} of {len(settings.endpoints)} servers answer: "
        f"{engine.info.kind or 'a server'} {version}"
    )
    # Workers ask again, and find the same version and the same losses or stop.
    probe_losses = tuple(engine.probe_losses.tolist())
    settings = replace(settings, version=told, probe_losses=probe_losses)
    return JobTeacher(source, digest, record, settings)
