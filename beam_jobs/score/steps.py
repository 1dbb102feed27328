"""The steps of the job that scores a dataset: one shard an element, one sidecar each.

Apache Beam's RunInference loads the teacher once per process and hands it elements. It would batch
elements as they come; a teacher wants batches of equally long pieces, which only a whole shard's
documents give, and a sidecar is written whole. So an element is a shard's number, and batching is
the engine's. Each step can run twice, or on two workers at once, without harm: a
sidecar is replaced whole by an equal one, and the score manifest comes last.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler

from beam_jobs import storage
from beam_jobs.running.progress import worker_progress
from beam_jobs.score.engine_options import api_key
from beam_jobs.score.far_shards import refuse_far_shards
from beam_jobs.score.reuse import open_reusable
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.selection import ChosenDocuments, Kept, select_documents
from pipeline.models.probe import probe_tokens
from pipeline.models.teacher_files import find_teacher
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines import load_engine
from pipeline.scoring.engines.interface import Engine, require_trained_engine
from pipeline.scoring.engines.settings import EngineSettings, ServedSettings
from pipeline.scoring.known_losses import KnownDocuments, KnownLosses
from pipeline.scoring.sidecars import accept_sidecar, make_sidecar, read_teacher_tokens
from schemas.index import ShardIndex
from schemas.records import read_record, write_record
from schemas.sidecar import (
    ScoreManifest,
    SidecarRecord,
    TeacherRule,
    encode_score_manifest,
    score_manifest_name,
    sidecar_name,
)

SUMMARY_FILE = "summary.json"

logger = logging.getLogger(__name__)


class ChangedError(ValueError):
    """What the job started with is not what a worker finds."""


@dataclass(frozen=True)
class ScoreJob:
    """Everything a worker needs to know; plain values only.

    Attributes:
        output: the dataset's folder.
        run_folder: temporary dataset of this teacher's run, inside `output`.
        dataset: fingerprint of the dataset.
        source: the teacher as the user named it.
        files: its folder, repository or .gguf file, "" where servers have it.
        rule: what determines the losses.
        settings: of what runs it.
        allow_untrained: accept a teacher that predicts no better than chance.
        started: when the command was, in seconds since 1970.
        reuses: whether the run's folder lists losses of other datasets.
    """

    output: str
    run_folder: str
    dataset: str
    source: str
    files: str
    rule: TeacherRule
    settings: EngineSettings
    allow_untrained: bool
    started: float
    reuses: bool = False


@dataclass(frozen=True)
class ShardScored:
    """What became of one shard.

    Attributes:
        shard: its number.
        record: of the sidecar.
        reused: whether an earlier run had written it.
        num_documents: of the shard, that were scored.
        num_known_documents: of them, those whose losses are another dataset's.
        num_known_tokens: of those.
        work: cost of scoring, as in `pipeline.scoring.engines.interface.Work`.
        matmul_rate: operations a second that the worker's own products reach.
    """

    shard: int
    record: SidecarRecord
    reused: bool
    num_documents: int
    num_known_documents: int
    num_known_tokens: int
    work: Mapping[str, int | float]
    matmul_rate: float

    @classmethod
    def from_json(cls, text: str) -> ShardScored:
        """Return what `to_json` gave."""
        return read_record(text, cls)

    def to_json(self) -> str:
        """Return it as one line."""
        return write_record(self)


@dataclass(frozen=True)
class ReadyTeacher:
    """A worker's teacher and the dataset that it reads.

    Attributes:
        engine: ready.
        selection: which documents it scores, where the job's rule has a condition.
        context: of the job's rule.
        matmul_rate: as in `ShardScored`.
        known: losses that it need not give.
    """

    engine: Engine
    selection: ChosenDocuments
    context: ContextRule
    matmul_rate: float
    known: KnownLosses

    @property
    def dataset(self) -> Dataset:
        """What it scores."""
        return self.selection.dataset

    def to_score(self, shard: int, index: ShardIndex) -> tuple[Pieces, Kept]:
        """Return a shard's pieces, and of which documents they are; None: of all of them."""
        pieces = self.context.pieces(index)
        if not self.selection.where:
            return pieces, None
        kept = self.selection.read(shard, with_removed=True)[1]
        assert kept is not None, "a condition always gives a mask"
        return pieces.of_documents(kept), kept


class TeacherHandler(ModelHandler[str, str, ReadyTeacher]):
    """Shard number -> `ShardScored` as JSON; the sidecar is in place by then."""

    def __init__(self, job: ScoreJob) -> None:
        """Hold the job; one element makes a batch."""
        super().__init__(min_batch_size=1, max_batch_size=1)
        self._job = job

    def load_model(self) -> ReadyTeacher:
        """Load the teacher, and check that it is the job's and knows its language.

        Raises:
            ChangedError: weights or dataset changed since the job started.
            UntrainedTeacherError: the weights did not load.
        """
        job = self._job
        dataset = open_dataset(job.output)
        _require_same("dataset", job.output, dataset.manifest.fingerprint, job.dataset)
        context = ContextRule.from_json(job.rule.context)
        path = ""
        if job.files and not isinstance(job.settings, ServedSettings):
            found = find_teacher(job.files)
            _require_same("teacher", job.files, found.sha256, job.rule.weights_sha256)
            path = str(found.path)
        engine = load_engine(
            job.settings,
            context,
            source=path,
            dtype=job.rule.dtype,
            dataset=dataset,
            api_key=api_key(),
        )
        if not job.allow_untrained:
            probe = probe_tokens(dataset)
            require_trained_engine(engine, probe, accepted_by="--allow-untrained-teacher")
        selection = select_documents(dataset, job.rule.where)
        known = open_reusable(job.run_folder) if job.reuses else KnownLosses(KnownDocuments(), ())
        return ReadyTeacher(engine, selection, context, engine.matmul_rate(), known)

    def run_inference(
        self,
        batch: Sequence[str],
        model: ReadyTeacher,
        inference_args: dict[str, Any] | None = None,
    ) -> Iterator[str]:
        """Yield what became of each shard."""
        for shard in batch:
            yield score_shard(self._job, int(shard), model).to_json()

    def get_metrics_namespace(self) -> str:
        """Return where Beam counts its own figures."""
        return "vocag"


class WriteScores(beam.DoFn):
    """(0, all shards) -> the score manifest's path, once every sidecar is in place."""

    def __init__(self, job: ScoreJob) -> None:
        """Hold the job."""
        self._job = job

    def process(self, element: tuple[int, Iterable[str]]) -> Iterator[str]:
        """Write the run's summary and, last, the manifest.

        Raises:
            FarShardsError: servers gave some shards losses far from the rest's.
        """
        job = self._job
        shards = {scored.shard: scored for scored in map(ShardScored.from_json, element[1])}
        ordered = [shards[number] for number in sorted(shards)]
        records = tuple(scored.record for scored in ordered)
        if isinstance(job.settings, ServedSettings):
            refuse_far_shards(
                records, output=job.output, run_folder=job.run_folder, started=job.started
            )
        manifest = ScoreManifest(job.dataset, job.rule, job.source, records)
        summary = _summary(ordered, time.time() - job.started)
        _write(job, storage.join(job.run_folder, SUMMARY_FILE), summary)
        path = storage.join(job.output, score_manifest_name(job.rule.fingerprint))
        _write(job, path, encode_score_manifest(manifest))
        yield path


def score_shard(job: ScoreJob, shard: int, teacher: ReadyTeacher) -> ShardScored:
    """Score a shard and write its sidecar, unless an earlier run has.

    Raises:
        DatasetError: the shard is damaged.
        NonFiniteLossError: the teacher gave NaN or infinity.
    """
    dataset, fingerprint = teacher.dataset, job.rule.fingerprint
    shard_record = dataset.manifest.shards[shard]
    index = dataset.read_index(shard, with_names=True)
    pieces, kept = teacher.to_score(shard, index)
    num_documents = len(index) if kept is None else int(kept.sum())
    progress = worker_progress(job.run_folder)
    path = storage.join(job.output, sidecar_name(shard_record.file, fingerprint))
    if storage.num_bytes_of(path) is not None:
        earlier = accept_sidecar(
            storage.read_bytes(path),
            shard_record=shard_record,
            index=index,
            pieces=pieces,
            teacher=fingerprint,
            kept=kept,
        )
        if earlier is not None:
            progress.add(reused_tokens=earlier.num_tokens)
            return ShardScored(shard, earlier, True, num_documents, 0, 0, {}, 0.0)
        logger.warning("%s is of no use: it is cut, or another shard's; scoring it again", path)
    tokens = read_teacher_tokens(dataset, shard, index, kept=kept)
    known = teacher.known.find(tokens, pieces, teacher.context)
    num_known, num_known_tokens = int(known.documents.sum()), int(known.of_known.sum())
    progress.add(reused_tokens=num_known_tokens)
    scored = teacher.engine.score(
        tokens,
        pieces.of_documents(~known.documents),
        names=index.document_id,
        advance=lambda count: progress.add(scored_tokens=count),
    )
    data, record = make_sidecar(
        known.join(scored.losses),
        tokens.starts,
        shard_record=shard_record,
        pieces=pieces,
        teacher=fingerprint,
    )
    _write(job, path, data)
    progress.add(scored_documents=num_documents - num_known)
    progress.flush()
    work, rate = asdict(scored.work), teacher.matmul_rate
    return ShardScored(shard, record, False, num_documents, num_known, num_known_tokens, work, rate)


def _require_same(what: str, name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ChangedError(
            f"{what} {name} has SHA-256 {found[:16]}… on this worker, the job started with "
            f"{expected[:16]}…: it was replaced, or this machine holds another; run the same "
            "command again"
        )


def _summary(shards: Sequence[ShardScored], elapsed_seconds: float) -> bytes:
    scored = [shard for shard in shards if not shard.reused]
    total = {name: sum(s.work[name] for s in scored) for name in (scored[0].work if scored else ())}
    # What the workers' own products would have taken for the same operations.
    ideal = sum(s.work["num_operations"] / s.matmul_rate for s in scored if s.matmul_rate)
    summary = {
        "num_documents": sum(s.num_documents - s.num_known_documents for s in scored),
        "num_scored_tokens": sum(s.record.num_tokens - s.num_known_tokens for s in scored),
        "num_known_documents": sum(s.num_known_documents for s in scored),
        "num_reused_shards": len(shards) - len(scored),
        "num_places": total.get("num_places", 0),
        "num_placed_tokens": total.get("num_tokens", 0),
        "scoring_seconds": total.get("seconds", 0.0),
        "num_operations": total.get("num_operations", 0.0),
        "num_requests": total.get("num_requests", 0),
        "num_retries": total.get("num_retries", 0),
        "ideal_seconds": ideal,
        "elapsed_seconds": elapsed_seconds,
    }
    return json.dumps(summary).encode()


def _write(job: ScoreJob, path: str, data: bytes) -> None:
    storage.write_atomically(path, data, scratch=job.run_folder)
