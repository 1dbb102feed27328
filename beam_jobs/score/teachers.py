"""A job's teacher: files or name, dtype, and engine."""

import os
from dataclasses import dataclass
from hashlib import sha256

from beam_jobs import storage
from beam_jobs.job_errors import OptionsError
from beam_jobs.score.options import ScoreOptions
from pipeline.dataset.files import Dataset
from pipeline.drawing.formatting import format_plural
from pipeline.models.fit import find_fitting
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.engine_settings import Handshake
from schemas.manifest import Manifest
from schemas.sidecar import (
    EngineRecord,
    ScoreManifest,
    TeacherRule,
    decode_score_manifest,
    score_manifest_name,
)

API_KEY = "VOCAG_API_KEY"
"""Environment variable with servers' key; not an option, because command lines are visible."""


@dataclass(frozen=True)
class JobTeacher:
    """A teacher, as named by the user, and its engine; None means transformers.

    `weights_sha256` is of its files, or of its name if they are out of sight. Workers check servers
    against `handshake`.
    """

    source: str
    weights_sha256: str
    dtype: str
    engine: EngineRecord | None = None
    handshake: Handshake | None = None


def find_job_teacher(options: ScoreOptions, dataset: Dataset, context: ContextRule) -> JobTeacher:
    """A job's teacher, checked as far as possible."""
    digest = ""
    if options.teacher:
        digest = find_fitting(options.teacher, dataset, side="teacher").sha256
    if options.engine == "openai":
        return _served(options, dataset, context, digest)
    return JobTeacher(options.teacher, digest, options.dtype or _default_dtype(options.here.device))


def api_key() -> str:
    """Servers' key from the environment, "" if unset."""
    return os.environ.get(API_KEY, "")


def run_configuration(rule: TeacherRule, dataset: str) -> dict[str, str]:
    """Identity of a run on a dataset with this fingerprint."""
    return {"scores": rule.fingerprint, "dataset": dataset}


def read_scores(folder: str, rule: TeacherRule) -> ScoreManifest | None:
    """A teacher's scores of a dataset's newest or an earlier state, None if missing or damaged."""
    path = storage.join(folder, score_manifest_name(rule.fingerprint))
    if storage.num_bytes_of(path) is None:
        return None
    try:
        return decode_score_manifest(storage.read_bytes(path), at=path)
    except ValueError:  # it is written anew
        return None


def find_finished(folder: str, manifest: Manifest, rule: TeacherRule) -> ScoreManifest | None:
    """A teacher's scores of a dataset, None if incomplete."""
    scores = read_scores(folder, rule)
    if scores is None:
        return None
    found = storage.list_folder(folder)
    complete = all(found.get(record.file) == record.num_bytes for record in scores.sidecars)
    same = (scores.dataset, len(scores.sidecars)) == (manifest.fingerprint, len(manifest.shards))
    return scores if complete and same else None


def _default_dtype(device: str) -> str:
    from pipeline.models.devices import find_device  # loads torch

    return "float32" if (device or str(find_device())) == "cpu" else "bfloat16"


def _served(
    options: ScoreOptions, dataset: Dataset, context: ContextRule, digest: str
) -> JobTeacher:
    from pipeline.scoring.engines.openai import connect

    settings = options.served
    handshake = connect(
        settings,
        context,
        dataset=dataset,
        api_key=api_key(),
        distributions=options.top.rule(dataset.manifest.teacher.vocab_size),
    ).handshake
    first, told = (settings.endpoint or ("",))[0], handshake.version
    if settings.engine_version and told and settings.engine_version != told:
        raise OptionsError(
            f"--engine-version {settings.engine_version}, but {first} says {told}: leave the "
            "option out"
        )
    version = told or settings.engine_version
    if not version:
        raise OptionsError(
            f"{first} does not report its version, which is part of its scores' identity: give it "
            "with --engine-version"
        )
    options.run.say(
        f"{format_plural(len(settings.endpoint or ()), 'server')} ready: "
        f"{handshake.program or 'a server'} {version}"
    )
    return JobTeacher(
        source=options.teacher or settings.model,
        weights_sha256=digest or sha256(f"served:{settings.model}".encode()).hexdigest(),
        dtype=options.dtype,
        engine=EngineRecord(
            name="openai",
            server=handshake.program,
            version=version,
            quantization=settings.quantization,
            model=settings.model,
            weights_of="files" if digest else "name",
        ),
        handshake=handshake,
    )
