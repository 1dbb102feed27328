"""The steps of the job that turn buckets into a dataset.

Each can run twice, or on two workers at once, without harm: temporary files have random names, a
bucket's commit record is replaced whole by an equal one, a final name is given by an atomic rename,
and nothing is removed: a runner that starts the job again, even for a loss in its last step, takes
over all that was finished. The launcher cleans up once the job has ended.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import apache_beam as beam
import orjson
from apache_beam.metrics import Metrics

from beam_jobs import storage
from beam_jobs.align.blocks import BlockStore, pack_blocks
from beam_jobs.align.buckets import align_bucket
from beam_jobs.align.inputs.lines import keep_line_count, name_lines
from beam_jobs.align.inputs.metadata import columns_of
from beam_jobs.align.inputs.overlap import exclude_overlap
from beam_jobs.align.inputs.pieces import decode_task
from beam_jobs.align.inputs.reading import DeadLetter, PlacedDocument, ReadingRules, read_piece
from beam_jobs.align.inputs.taken_ids import TAKEN_IDS, TakenId, read_taken_ids
from beam_jobs.align.job import BucketRecord, Job, Part, number_shards
from beam_jobs.generations import read_kept
from beam_jobs.running.progress import worker_progress
from beam_jobs.runs import SUMMARY_FILE, require_shared
from pipeline.alignment.quality import AlignmentStatistics
from schemas.manifest import (
    MANIFEST_FILE,
    DeadLetterRecord,
    Manifest,
    encode_manifest,
    next_generation,
)

_PROGRESS_DOCUMENTS = 1000

Outcome = PlacedDocument | DeadLetter | TakenId


class _JobStep(beam.DoFn):
    """A step that knows the job."""

    def __init__(self, job: Job) -> None:
        """Hold the job; it travels to the workers with the step."""
        self._job = job


class ReadBlocks(_JobStep):
    """Task -> (bucket, block of documents and dead letters)."""

    num_documents = Metrics.counter("vocag", "documents_read")

    def start_bundle(self) -> None:
        """Check that this worker's files will be found."""
        require_shared(self._job.run_folder)

    def process(self, element: str) -> Iterator[tuple[int, bytes]]:
        """Yield what a reading task holds, packed by bucket."""
        store = BlockStore(self._job.shuffle, self._job.run_folder)
        outcomes = self._count(self._read(element, self._job.rules))
        yield from store.hand_over(pack_blocks(outcomes, self._job.num_buckets))

    def finish_bundle(self) -> None:
        """Show the last counts."""
        worker_progress(self._job.run_folder).flush()

    def _read(self, task: str, rules: ReadingRules) -> Iterator[Outcome]:
        for piece in decode_task(task):
            if piece.format == TAKEN_IDS:
                yield from read_taken_ids(piece)
            else:
                count_lines = partial(keep_line_count, self._job.run_folder, piece)
                outcomes = read_piece(piece, rules, count_lines=count_lines)
                yield from exclude_overlap(outcomes, self._job.overlap)

    def _count(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        progress = worker_progress(self._job.run_folder)
        num_documents = num_bytes = 0
        for outcome in outcomes:
            num_documents += not isinstance(outcome, TakenId)
            num_bytes += len(outcome.text) if isinstance(outcome, PlacedDocument) else 0
            if num_documents == _PROGRESS_DOCUMENTS:
                progress.add(read_documents=num_documents, read_bytes=num_bytes)
                self.num_documents.inc(num_documents)
                num_documents = num_bytes = 0
            yield outcome
        progress.add(read_documents=num_documents, read_bytes=num_bytes)
        self.num_documents.inc(num_documents)


class AlignBucket(_JobStep):
    """(bucket, blocks) -> the bucket's commit record."""

    num_documents = Metrics.counter("vocag", "documents_aligned")
    num_student_tokens = Metrics.counter("vocag", "student_tokens")
    num_dead_letters = Metrics.counter("vocag", "dead_letters")

    def process(self, element: tuple[int, Iterable[bytes]]) -> Iterator[str]:
        """Yield one record."""
        record = align_bucket(*element, self._job)
        self.num_documents.inc(sum(part.shard.num_documents for part in record.parts))
        self.num_student_tokens.inc(sum(part.shard.num_student_tokens for part in record.parts))
        self.num_dead_letters.inc(sum(record.by_reason.values()))
        yield record.to_json()

    def finish_bundle(self) -> None:
        """Show the last counts."""
        worker_progress(self._job.run_folder).flush()


class NumberShards(_JobStep):
    """(0, all commit records) -> each record with its shards' final names."""

    def process(self, element: tuple[int, Iterable[str]]) -> Iterator[str]:
        """Yield the records in bucket order."""
        records = number_shards(map(BucketRecord.from_json, element[1]), self._job.prefix)
        yield from (record.to_json() for record in records)


class PublishShards(_JobStep):
    """Record -> the same record, its shards now under their final names."""

    def process(self, element: str) -> Iterator[str]:
        """Publish a bucket's tars and indices."""
        for part in BucketRecord.from_json(element).parts:
            shard = part.shard
            self._publish(part.tar, shard.file, shard.num_bytes)
            self._publish(part.index, shard.index_file, shard.index_num_bytes)
        yield element

    def _publish(self, temporary: str, final: str, num_bytes: int) -> None:
        run_folder = self._job.run_folder
        storage.publish(
            storage.join(run_folder, temporary),
            storage.join(self._job.output, final),
            num_bytes,
            scratch=run_folder,
        )


class WriteManifest(_JobStep):
    """(0, all records) -> the manifest's path, once the dataset is complete."""

    def process(self, element: tuple[int, Iterable[str]]) -> Iterator[str]:
        """Write dead letters, the run's summary and, last, the manifest.

        Without a new document there is no new generation: the manifest stays.
        """
        records = [BucketRecord.from_json(record) for record in element[1]]
        records.sort(key=lambda record: record.bucket)
        dead_letters = self._write_dead_letters(records)
        self._write(self._job.run_folder, SUMMARY_FILE, self._summary(records))
        if not self._job.generation or any(record.parts for record in records):
            manifest = make_manifest(records, dead_letters, self._job)
            self._write(self._job.output, MANIFEST_FILE, encode_manifest(manifest))
        yield storage.join(self._job.output, MANIFEST_FILE)

    def _write_dead_letters(self, records: Iterable[BucketRecord]) -> DeadLetterRecord:
        """Merge the buckets' dead letters; they are held in memory once."""
        letters: list[dict[str, Any]] = []
        by_reason: Counter[str] = Counter()
        for record in records:
            by_reason.update(record.by_reason)
            if record.dead_letters:
                path = storage.join(self._job.run_folder, record.dead_letters)
                letters += map(orjson.loads, storage.read_bytes(path).splitlines())
        letters.sort(key=lambda letter: (letter["source"], letter["position"]))
        named = name_lines(letters, self._job.run_folder)
        data = b"".join(orjson.dumps(x, option=orjson.OPT_APPEND_NEWLINE) for x in named)
        file = self._job.dead_letters_file
        self._write(self._job.output, file, data)
        counts = dict(sorted(by_reason.items()))
        return DeadLetterRecord(file, sha256(data).hexdigest(), len(letters), counts)

    def _summary(self, records: list[BucketRecord]) -> bytes:
        summary = {
            "student_reference_documents": sum(r.student_reference_documents for r in records),
            "teacher_reference_documents": sum(r.teacher_reference_documents for r in records),
            "reused_buckets": sum(r.attempt != self._job.attempt for r in records),
            "elapsed_seconds": max(0.0, time.time() - self._job.started),
        }
        return json.dumps(summary).encode()

    def _write(self, folder: str, name: str, data: bytes) -> None:
        storage.write_atomically(storage.join(folder, name), data, scratch=self._job.run_folder)


def make_manifest(
    records: Iterable[BucketRecord], dead_letters: DeadLetterRecord, job: Job
) -> Manifest:
    """Return the manifest of numbered records in bucket order.

    It holds nothing that differs between runners, workers or attempts: no times, hosts or counts of
    retries.
    """
    parts = [part for record in records for part in record.parts]
    if job.generation:
        return _extend_manifest(parts, dead_letters, job)
    student, teacher = job.tokenizer_records
    statistics = AlignmentStatistics.merge(
        AlignmentStatistics.from_json(part.statistics) for part in parts
    )
    return Manifest(
        name=job.name,
        student=student,
        teacher=teacher,
        shards=tuple(part.shard for part in parts),
        dead_letters=dead_letters,
        configuration=job.configuration,
        statistics=statistics.to_json(),
        metadata=columns_of(job.rules.metadata),
    )


def _extend_manifest(parts: Sequence[Part], dead_letters: DeadLetterRecord, job: Job) -> Manifest:
    """Return the manifest of the generation before, and new shards behind its own."""
    before = read_kept(job.output, job.generation - 1)
    told = (before.statistics, *(part.statistics for part in parts))
    statistics = AlignmentStatistics.merge(AlignmentStatistics.from_json(each) for each in told)
    return next_generation(
        before,
        shards=(*before.shards, *(part.shard for part in parts)),
        dead_letters=dead_letters,
        configuration=job.configuration,
        statistics=statistics.to_json(),
    )
