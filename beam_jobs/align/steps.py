"""The steps of the job that turn buckets into a dataset.

Each can run twice, or on two workers at once, without harm: temporary files have random names, a
bucket's commit record is replaced whole by an equal one, a final name is given by an atomic rename,
and nothing is removed: a runner that starts the job again, even for a loss in its last step, takes
over all that was finished. The launcher cleans up once the job has ended.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import apache_beam as beam
import orjson

from beam_jobs import storage
from beam_jobs.align.blocks import BlockStore, Record, pack_blocks
from beam_jobs.align.buckets import align_bucket
from beam_jobs.align.inputs.lines import keep_line_count, name_lines
from beam_jobs.align.inputs.metadata import columns_of
from beam_jobs.align.inputs.parts import decode_task
from beam_jobs.align.inputs.reading import read_part, show_progress
from beam_jobs.align.inputs.taken_ids import TAKEN_IDS, read_taken_ids
from beam_jobs.align.job import BucketRecord, Job, number_shards
from beam_jobs.generations import read_kept
from beam_jobs.running.progress import worker_progress
from beam_jobs.runs import SUMMARY_FILE, require_shared
from beam_jobs.transforms import Gather, Spread
from pipeline.alignment.quality import AlignmentStatistics
from schemas.manifest import (
    MANIFEST_FILE,
    DeadLetterRecord,
    Manifest,
    encode_manifest,
    next_generation,
)
from schemas.records import read_record, write_record


def build_pipeline(pipeline: beam.Pipeline, tasks: Sequence[str], job: Job) -> None:
    """Describe the job: one chain, no tagged outputs and no side inputs.

    The shuffle carries text, not tensors, and the bucket of a document is a function of its id, so
    what is in a shard depends neither on the runner nor on the number of workers.
    """
    _ = (
        pipeline
        | "Tasks" >> beam.Create(tasks)
        | "SpreadTasks" >> Spread()
        | "ReadDocuments" >> beam.ParDo(ReadBlocks(job)).with_output_types(tuple[int, bytes])
        | "GroupByBucket" >> beam.GroupByKey()
        | "AlignAndWrite" >> beam.ParDo(AlignBucket(job)).with_output_types(str)
        | "GatherBuckets" >> Gather()
        | "NumberShards" >> beam.ParDo(NumberShards(job)).with_output_types(str)
        | "SpreadShards" >> Spread()
        | "PublishShards" >> beam.ParDo(PublishShards(job)).with_output_types(str)
        | "GatherShards" >> Gather()
        | "WriteManifest" >> beam.ParDo(WriteManifest(job)).with_output_types(str)
    )


class _JobStep(beam.DoFn):
    """A step that knows the job."""

    def __init__(self, job: Job) -> None:
        """Hold the job; it travels to the workers with the step."""
        self._job = job


class ReadBlocks(_JobStep):
    """Task -> (bucket, block of documents and dead letters)."""

    def start_bundle(self) -> None:
        """Check that this worker's files will be found."""
        require_shared(self._job.run_folder)

    def process(self, element: str) -> Iterator[tuple[int, bytes]]:
        """Yield what a reading task holds, packed by bucket."""
        run_folder = self._job.run_folder
        store = BlockStore(self._job.shuffle, run_folder)
        records = show_progress(self._read(element), run_folder)
        yield from store.hand_over(pack_blocks(records, self._job.num_buckets))

    def finish_bundle(self) -> None:
        """Show the last counts."""
        worker_progress(self._job.run_folder).flush()

    def _read(self, task: str) -> Iterator[Record]:
        for part in decode_task(task):
            if part.file.format == TAKEN_IDS:
                yield from read_taken_ids(part)
            else:
                count_lines = partial(keep_line_count, self._job.run_folder, part)
                yield from read_part(part, self._job.rules, count_lines=count_lines)


class AlignBucket(_JobStep):
    """(bucket, blocks) -> the bucket's commit record."""

    def process(self, element: tuple[int, Iterable[bytes]]) -> Iterator[str]:
        """Yield one record."""
        yield write_record(align_bucket(*element, self._job))

    def finish_bundle(self) -> None:
        """Show the last counts."""
        worker_progress(self._job.run_folder).flush()


class NumberShards(_JobStep):
    """(0, all commit records) -> each record with its shards' final names."""

    def process(self, element: tuple[int, Iterable[str]]) -> Iterator[str]:
        """Yield the records in bucket order."""
        records = (read_record(each, BucketRecord) for each in element[1])
        yield from map(write_record, number_shards(records, self._job.prefix))


class PublishShards(_JobStep):
    """Record -> the same record, its shards now under their final names."""

    def process(self, element: str) -> Iterator[str]:
        """Publish a bucket's tars and indices."""
        for tar in read_record(element, BucketRecord).tars:
            shard = tar.shard
            self._publish(tar.tar, shard.file, shard.num_bytes)
            self._publish(tar.index, shard.index_file, shard.index_num_bytes)
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

        Without a usable document there is no dataset, and no new generation.
        """
        records = [read_record(record, BucketRecord) for record in element[1]]
        records.sort(key=lambda record: record.bucket)
        dead_letters = self._write_dead_letters(records)
        reused = sum(record.attempt != self._job.attempt for record in records)
        summary = json.dumps({"reused_buckets": reused}).encode()
        self._write(self._job.run_folder, SUMMARY_FILE, summary)
        if any(record.tars for record in records):
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

    def _write(self, folder: str, name: str, data: bytes) -> None:
        storage.write_atomically(storage.join(folder, name), data, scratch=self._job.run_folder)


def make_manifest(
    records: Iterable[BucketRecord], dead_letters: DeadLetterRecord, job: Job
) -> Manifest:
    """Return the manifest of numbered records in bucket order.

    It holds nothing that differs between runners, workers or attempts: no times, hosts or counts of
    retries.
    """
    tars = [tar for record in records for tar in record.tars]
    shards = tuple(tar.shard for tar in tars)
    before = read_kept(job.output, job.generation - 1) if job.generation else None
    known = [] if before is None else [before.statistics]
    statistics = AlignmentStatistics.merge(
        AlignmentStatistics.from_json(each) for each in (*known, *(tar.statistics for tar in tars))
    )
    made: dict[str, Any] = {
        "dead_letters": dead_letters,
        "configuration": job.configuration,
        "statistics": statistics.to_json(),
    }
    if before is not None:
        return next_generation(before, shards=(*before.shards, *shards), **made)
    student, teacher = job.tokenizer_records
    metadata = columns_of(job.rules.metadata)
    return Manifest(job.name, student, teacher, shards=shards, metadata=metadata, **made)
