"""Steps of the job that scores a dataset, a shard per element.

The engine batches, not RunInference: equally long pieces take a whole shard's documents. Each step
can run twice, or on two workers at once: a sidecar is replaced by an equal one, and the score
manifest comes last.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import Any

import numpy as np
from apache_beam.ml.inference.base import ModelHandler

from beam_jobs import storage
from beam_jobs.resuming import SUMMARY_FILE
from beam_jobs.running.job_progress import worker_progress
from beam_jobs.score.far_shards import refuse_far_shards
from beam_jobs.score.reuse import open_reusable
from beam_jobs.score.teachers import api_key, read_scores
from pipeline.dataset.chosen_documents import ChosenDocuments, select_documents
from pipeline.dataset.dataset_reading import find_generation
from pipeline.dataset.document_scores import make_document_scores
from pipeline.dataset.files import open_dataset
from pipeline.models.probe import probe_tokens
from pipeline.models.teacher_files import find_teacher
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.engine_settings import Handshake, ServedSettings, TransformersSettings
from pipeline.scoring.engines.interface import Engine, Work, require_trained_engine
from pipeline.scoring.reusable_losses import ReusableDocuments, ReusableLosses
from pipeline.scoring.sidecars import ShardToScore
from schemas.document_score_table import document_scores_name
from schemas.errors import DamagedShardError
from schemas.records import read_record, write_record
from schemas.sidecar import (
    ScoreManifest,
    SidecarRecord,
    TeacherRule,
    decode_sidecar,
    encode_score_manifest,
    score_manifest_name,
    sidecar_name,
)
from schemas.stored_distributions import TopTokens

NOTHING_KNOWN = ReusableLosses(ReusableDocuments(), ())

logger = logging.getLogger(__name__)


class ChangedError(ValueError):
    """A worker's input differs from the one at the job's start."""


@dataclass(frozen=True)
class ScoreJob:
    """Everything a worker needs; plain values only.

    Servers are checked against `handshake`. `started` is in seconds since 1970. With `reuses`,
    known losses are in the run's folder.
    """

    dataset: str
    fingerprint: str
    run_folder: str
    source: str
    files: str
    rule: TeacherRule
    settings: TransformersSettings | ServedSettings
    handshake: Handshake | None
    allow_untrained: bool
    started: float
    reuses: bool = False


@dataclass
class WorkDone:
    """Work done; values can be added.

    Known documents have another dataset's losses; resumed shards are an earlier run's.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_known_documents: int = 0
    num_resumed_shards: int = 0
    work: Work = field(default_factory=Work)

    def __add__(self, other: "WorkDone") -> "WorkDone":
        names = [entry.name for entry in fields(self)]
        return WorkDone(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class ShardScored:
    """One shard's number, sidecar record and work."""

    shard: int
    record: SidecarRecord
    done: WorkDone


class ReadyTeacher:
    """A worker's dataset, and its teacher, loaded on demand.

    Losses in `known` are not computed again.
    """

    def __init__(
        self, job: ScoreJob, documents: ChosenDocuments, known: ReusableLosses = NOTHING_KNOWN
    ) -> None:
        """Load nothing yet."""
        self.job = job
        self.documents = documents
        self.context = ContextRule.from_json(job.rule.context)
        self.known = known
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    def shard(self, number: int) -> ShardToScore:
        """Open the scored part of a shard; reads its index."""
        return ShardToScore.open(self.documents, number, self.context)

    @property
    def engine(self) -> Engine:
        """The teacher; ChangedError if its weights aren't the job's."""
        with self._lock:
            if self._engine is None:
                self._engine = self._load()
        return self._engine

    def _load(self) -> Engine:
        job, dataset = self.job, self.documents.dataset
        engine: Engine
        if isinstance(job.settings, ServedSettings):
            from pipeline.scoring.engines.openai import connect

            engine = connect(
                job.settings,
                self.context,
                dataset=dataset,
                api_key=api_key(),
                known=job.handshake,
                distributions=job.rule.distributions,
            )
        else:
            from pipeline.scoring.engines.transformers import load_scorer

            found = find_teacher(job.files)
            _require_same("teacher", job.files, found.sha256, job.rule.weights_sha256)
            path = str(found.path)
            engine = load_scorer(
                path,
                self.context,
                dtype=job.rule.dtype,
                settings=job.settings,
                distributions=job.rule.distributions,
            )
        if not job.allow_untrained:
            require_trained_engine(engine, probe_tokens(dataset))
        return engine


class TeacherHandler(ModelHandler[str, str, ReadyTeacher]):
    """Shard number -> `ShardScored` as JSON, once the sidecar is in place."""

    def __init__(self, job: ScoreJob) -> None:
        """Make each element a batch."""
        super().__init__(min_batch_size=1, max_batch_size=1)
        self._job = job

    def load_model(self) -> ReadyTeacher:
        """Open the dataset once per process, as it was at the start; ChangedError if it isn't."""
        job = self._job
        dataset = open_dataset(job.dataset)
        if (generation := find_generation(dataset.manifest, job.fingerprint)) is not None:
            dataset = dataset.at_generation(generation)
        _require_same("dataset", job.dataset, dataset.manifest.fingerprint, job.fingerprint)
        known = open_reusable(job.run_folder) if job.reuses else NOTHING_KNOWN
        return ReadyTeacher(job, select_documents(dataset, job.rule.where), known)

    def run_inference(
        self,
        batch: Sequence[str],
        model: ReadyTeacher,
        inference_args: dict[str, Any] | None = None,
    ) -> Iterator[str]:
        """Yield each shard's result."""
        for shard in batch:
            yield write_record(score_shard(int(shard), model))

    def get_metrics_namespace(self) -> str:
        """Of Beam's own metrics."""
        return "vocag"


def write_scores(scored: tuple[int, Iterable[str]], job: ScoreJob) -> str:
    """Write the summary and, last, the score manifest; return its path."""
    shards = {one.shard: one for one in (read_record(text, ShardScored) for text in scored[1])}
    records = tuple(shards[number].record for number in sorted(shards))
    if isinstance(job.settings, ServedSettings):
        earlier = read_scores(job.dataset, job.rule)  # runs read them
        refuse_far_shards(
            records,
            accepted={record.sha256 for record in earlier.sidecars} if earlier else set(),
            dataset=job.dataset,
            run_folder=job.run_folder,
            started=job.started,
        )
    manifest = ScoreManifest(job.fingerprint, job.rule, job.source, records)
    done = sum((one.done for one in shards.values()), WorkDone())
    _write(job, storage.join(job.run_folder, SUMMARY_FILE), write_record(done).encode())
    return _write_manifest(job, manifest)


def score_shard(number: int, teacher: ReadyTeacher) -> ShardScored:
    """Score a shard and write its sidecar, unless an earlier run has.

    DatasetError if the shard is damaged, NonFiniteLossError for a loss of NaN or infinity.
    """
    job, shard = teacher.job, teacher.shard(number)
    fingerprint, progress = job.rule.fingerprint, worker_progress(job.run_folder)
    path = storage.join(job.dataset, sidecar_name(shard.record.file, fingerprint))
    if storage.num_bytes_of(path) is not None:
        left = storage.read_bytes(path)
        earlier = shard.accept_sidecar(left, fingerprint, job.rule.distributions)
        if earlier is not None:
            earlier = write_document_scores(job, shard, left, earlier)
            progress.add(reused_tokens=earlier.num_tokens)
            return ShardScored(number, earlier, WorkDone(num_resumed_shards=1))
        logger.warning("%s can't be used: it is cut, or another shard's; scoring it again", path)
    tokens = shard.read_tokens()
    found = teacher.known.find(tokens, shard.pieces, teacher.context)
    is_known, rule = found >= 0, job.rule.distributions
    of_known = np.repeat(is_known, shard.lengths)
    progress.add(reused_tokens=int(of_known.sum()))
    done = WorkDone(
        num_documents=shard.num_documents - int(is_known.sum()),
        num_tokens=int((~of_known).sum()),
        num_known_documents=int(is_known.sum()),
    )
    losses, top = teacher.known.read(found, tokens.starts), None
    pieces = shard.pieces.of_documents(~is_known)
    if len(pieces):
        scored = teacher.engine.score(
            tokens,
            pieces,
            names=shard.index.document_id,
            advance=lambda count: progress.add(scored_tokens=count),
        )
        losses, top = np.where(of_known, losses, scored.losses), scored.top
        done.work = scored.work
    if rule is not None:
        top = top or TopTokens.empty(tokens.starts, rule)
        teacher.known.read_top(found, tokens, top)
    learned = tokens.learned if job.rule.learned_only else None
    if learned is not None and top is not None:
        top.ids[tokens.unlearned_positions()] = -1
    data, record = shard.make_sidecar(losses, fingerprint, top, learned)
    _write(job, path, data)
    record = write_document_scores(job, shard, data, record)
    progress.add(scored_documents=done.num_documents)
    progress.flush()
    return ShardScored(number, record, done)


def write_document_scores(
    job: ScoreJob, shard: ShardToScore, sidecar: bytes, record: SidecarRecord
) -> SidecarRecord:
    """Write a sidecar's table of document scores; return a record that names it."""
    name = sidecar_name(shard.record.file, job.rule.fingerprint)
    losses = decode_sidecar(sidecar, at=name)
    table = make_document_scores(losses, shard.index, sha256(sidecar).hexdigest())
    _write(job, storage.join(job.dataset, document_scores_name(name)), table)
    return replace(record, documents_sha256=sha256(table).hexdigest())


def complete_document_scores(
    job: ScoreJob, documents: ChosenDocuments, scores: ScoreManifest
) -> int:
    """Write tables that finished scores lack, without a teacher; return how many."""
    there = storage.list_folder(job.dataset)
    context, number = ContextRule.from_json(job.rule.context), 0
    records = list(scores.sidecars)
    for place, record in enumerate(records):
        if document_scores_name(record.file) not in there:
            shard = ShardToScore.open(documents, place, context)
            path = storage.join(job.dataset, record.file)
            data = storage.read_bytes(path)
            if sha256(data).hexdigest() != record.sha256:
                raise DamagedShardError(
                    f"{path} was altered, its SHA-256 isn't that in the score manifest: delete it "
                    "and run vocag score again"
                )
            records[place] = write_document_scores(job, shard, data, record)
            number += 1
    _write_manifest(job, replace(scores, sidecars=tuple(records)))
    return number


def _write_manifest(job: ScoreJob, manifest: ScoreManifest) -> str:
    path = storage.join(job.dataset, score_manifest_name(job.rule.fingerprint))
    _write(job, path, encode_score_manifest(manifest))
    return path


def _require_same(what: str, name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ChangedError(
            f"{what} {name} has SHA-256 {found[:16]}… on this worker, the job started with "
            f"{expected[:16]}…: it was replaced, or this machine holds another; run the same "
            "command again"
        )


def _write(job: ScoreJob, path: str, data: bytes) -> None:
    storage.write_atomically(path, data, scratch=job.run_folder)
