"""The job that makes a dataset, and one that first counts lost texts.

Each step can run twice, or on two workers at once: temporary names are random, a commit record is
replaced by an equal one, renames are atomic, and nothing is removed until the launcher cleans up.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from operator import itemgetter
from typing import Any

import apache_beam as beam
import orjson

from beam_jobs import storage
from beam_jobs.align.bucket_blocks import BlockStore, Record, pack_blocks
from beam_jobs.align.buckets import align_bucket
from beam_jobs.align.inputs.datasets import InputDataset
from beam_jobs.align.inputs.document_reading import read_part, show_progress
from beam_jobs.align.inputs.documents import DeadLetter, ReadingRules, Reason
from beam_jobs.align.inputs.lines import keep_line_count, name_lines
from beam_jobs.align.inputs.metadata import columns_of
from beam_jobs.align.inputs.parts import decode_task
from beam_jobs.align.inputs.taken_ids import TAKEN_IDS, read_taken_ids
from beam_jobs.align.inputs.unusable import letters_of_files, note_unusable
from beam_jobs.align.job import BucketRecord, Job, number_shards
from beam_jobs.generations import read_kept
from beam_jobs.resuming import SUMMARY_FILE, read_commit
from beam_jobs.running.transforms import Gather, Spread, worker_step
from pipeline.alignment.quality import AlignmentStatistics
from pipeline.drawing.formatting import format_count, format_share
from schemas.manifest import (
    CHATS_VERSION,
    MANIFEST_FILE,
    DeadLetterRecord,
    Manifest,
    encode_manifest,
    next_generation,
)
from schemas.records import Count, read_record, write_record

_LOST_TEXTS_FILE = "lost_texts.json"
_MOST_NAMED = 5


@dataclass(frozen=True)
class LostTexts:
    """The number of documents without texts, and their first ids."""

    count: Count
    first: tuple[str, ...]


def build_pipeline(pipeline: beam.Pipeline, tasks: Sequence[str], job: Job) -> None:
    """Describe the job: one chain, no tagged outputs or side inputs.

    The shuffle carries text, not tensors. An id determines its bucket, so shards don't depend on
    the runner or the number of workers.
    """
    folder = job.run_folder
    _ = (
        pipeline
        | "Tasks" >> beam.Create(tasks)
        | "SpreadTasks" >> Spread()
        | "ReadDocuments" >> worker_step(partial(_read_blocks, job=job), folder, tuple[int, bytes])
        | "GroupByBucket" >> beam.GroupByKey()
        | "AlignAndWrite" >> worker_step(partial(_align, job=job), folder, str)
        | "GatherBuckets" >> Gather()
        | "NumberShards" >> beam.FlatMap(_number, job).with_output_types(str)
        | "SpreadShards" >> Spread()
        | "PublishShards" >> beam.Map(_publish, job).with_output_types(str)
        | "GatherShards" >> Gather()
        | "WriteManifest" >> beam.Map(_write_manifest, job).with_output_types(str)
    )


def count_lost_texts(
    pipeline: beam.Pipeline, tasks: Sequence[str], rules: ReadingRules, run_folder: str
) -> None:
    """Describe the job that counts lost texts, before hours of work.

    A dataset may lack texts, and tokens may not spell them (WordPiece, or a normaliser).
    """
    count = partial(_count, rules=rules, run_folder=run_folder)
    _ = (
        pipeline
        | "Tasks" >> beam.Create(tasks)
        | "SpreadTasks" >> Spread()
        | "CountTask" >> worker_step(count, run_folder, str)
        | "GatherCounts" >> Gather()
        | "WriteCount" >> beam.Map(_write_sum, run_folder).with_output_types(str)
    )


def read_lost_texts(run_folder: str) -> LostTexts | None:
    """The job's counts, None before it has run."""
    return read_commit(storage.join(run_folder, _LOST_TEXTS_FILE), LostTexts)


def describe_lost_texts(lost: LostTexts, dataset: InputDataset) -> str:
    """Describe lost texts, with first ids and a remedy."""
    named = ", ".join(f'"{name}"' for name in lost.first)
    more = ", …" if lost.count > len(lost.first) else ""
    share = format_share(lost.count, dataset.num_documents)
    return (
        f"{format_count(lost.count)} of {format_count(dataset.num_documents)} documents ({share}) "
        f"of {dataset.dataset.location} can't be aligned again: it keeps no text of them, and "
        "neither the student's nor the teacher's tokens spell it (SHA-256 compared). They are "
        f"{named}{more}. Align the files that it was made of, with --keep-text if this is to be "
        "possible later, or leave these documents out with a larger --max-dead-letters"
    )


def _read_blocks(task: str, job: Job) -> Iterator[tuple[int, bytes]]:
    store = BlockStore(job.shuffle, job.run_folder)
    records = show_progress(_read(task, job), job.run_folder)
    yield from store.hand_over(pack_blocks(records, job.num_buckets))


def _read(task: str, job: Job) -> Iterator[Record]:
    for part in decode_task(task):
        if part.file.format == TAKEN_IDS:
            yield from read_taken_ids(part)
        else:
            count_lines = partial(keep_line_count, job.run_folder, part)
            outcomes = read_part(part, job.rules, count_lines=count_lines)
            yield from note_unusable(outcomes, part, job.run_folder)


def _align(bucket: tuple[int, Iterable[bytes]], job: Job) -> Iterator[str]:
    yield write_record(align_bucket(*bucket, job))


def _number(all_records: tuple[int, Iterable[str]], job: Job) -> Iterator[str]:
    records = (read_record(each, BucketRecord) for each in all_records[1])
    yield from map(write_record, number_shards(records, job.prefix))


def _publish(record: str, job: Job) -> str:
    for tar in read_record(record, BucketRecord).tars:
        shard = tar.shard
        for temporary, final, num_bytes in (
            (tar.tar, shard.file, shard.num_bytes),
            (tar.index, shard.index_file, shard.index_num_bytes),
        ):
            made, named = storage.join(job.run_folder, temporary), storage.join(job.output, final)
            storage.publish(made, named, num_bytes, scratch=job.run_folder)
    return record


def _count(task: str, rules: ReadingRules, run_folder: str) -> Iterator[str]:
    outcomes = (o for part in decode_task(task) for o in read_part(part, rules))
    lost = [
        str(outcome.document_id)
        for outcome in show_progress(outcomes, run_folder)
        if isinstance(outcome, DeadLetter) and outcome.reason == Reason.TEXT_LOST
    ]
    yield write_record(LostTexts(len(lost), tuple(sorted(lost)[:_MOST_NAMED])))


def _write_sum(counts: tuple[int, Iterable[str]], run_folder: str) -> str:
    parts = [read_record(part, LostTexts) for part in counts[1]]
    first = sorted(name for part in parts for name in part.first)[:_MOST_NAMED]
    whole = LostTexts(sum(part.count for part in parts), tuple(first))
    path = storage.join(run_folder, _LOST_TEXTS_FILE)
    storage.write_atomically(path, write_record(whole).encode(), scratch=run_folder)
    return path


def _write_manifest(all_records: tuple[int, Iterable[str]], job: Job) -> str:
    """Write dead letters, summary and, last, the manifest; return its path."""
    records = [read_record(record, BucketRecord) for record in all_records[1]]
    records.sort(key=lambda record: record.bucket)
    dead_letters = _write_dead_letters(records, job)
    reused = sum(record.attempt != job.attempt for record in records)
    control_strings: Counter[str] = Counter()
    for record in records:
        control_strings.update(record.control_strings)
    summary = storage.join(job.run_folder, SUMMARY_FILE)
    told = {"reused_buckets": reused, "control_strings": control_strings}
    _write(summary, json.dumps(told).encode(), job)
    path = storage.join(job.output, MANIFEST_FILE)
    if any(record.tars for record in records):
        _write(path, encode_manifest(make_manifest(records, dead_letters, job)), job)
    return path


def _write_dead_letters(records: Iterable[BucketRecord], job: Job) -> DeadLetterRecord:
    letters: list[dict[str, Any]] = []
    by_reason: Counter[str] = Counter()
    for record in records:
        by_reason.update(record.by_reason)
        if record.dead_letters:
            path = storage.join(job.run_folder, record.dead_letters)
            letters += map(orjson.loads, storage.read_bytes(path).splitlines())
    letters.sort(key=itemgetter("source", "position"))
    named = name_lines(letters, job.run_folder)
    of_files = letters_of_files(named, job.run_folder)
    by_reason.update(letter["reason"] for letter in of_files)
    named = sorted([*of_files, *named], key=itemgetter("source", "position"))
    data = b"".join(orjson.dumps(x, option=orjson.OPT_APPEND_NEWLINE) for x in named)
    _write(storage.join(job.output, job.dead_letters_file), data, job)
    counts = dict(sorted(by_reason.items()))
    return DeadLetterRecord(job.dead_letters_file, sha256(data).hexdigest(), len(named), counts)


def _write(path: str, data: bytes, job: Job) -> None:
    storage.write_atomically(path, data, scratch=job.run_folder)


def make_manifest(
    records: Iterable[BucketRecord], dead_letters: DeadLetterRecord, job: Job
) -> Manifest:
    """Make the manifest from numbered records in bucket order.

    Nothing in it differs between runners, workers or attempts.
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
    if job.chats is not None:
        made |= {"chats": job.chats.record, "schema_version": CHATS_VERSION}
    return Manifest(job.name, student, teacher, shards=shards, metadata=metadata, **made)
