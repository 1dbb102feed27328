"""A job for its workers, their reports, and its needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from beam_jobs import storage
from beam_jobs.align.inputs.documents import ReadingRules
from beam_jobs.align.inputs.parts import SAMPLE_BYTES_PER_TEXT_BYTE
from beam_jobs.align.job_chats import JobChats
from beam_jobs.align.options import AlignOptions, Shuffle
from beam_jobs.tokenizer_files import StoredTokenizer
from schemas.manifest import DEAD_LETTERS_FILE, ShardRecord, TokenizerRecord
from schemas.records import Count

BASE_MEMORY = 850 * 10**6
"""Python, Beam, two tokenizers, their memory of words, and the batches under way."""

MEMORY_PER_DOCUMENT_BYTE = 40
"""Both tokenizations, their spans and the sample of one document take 19 for each byte of its text,
and 40 in the process that reads it again for the report, where texts aren't kept; measured with
documents of 1 and 16 MB."""


@dataclass(frozen=True)
class Job:
    """Everything a worker needs; pickled with Beam's code, so plain values only.

    `run_folder` is inside `output`. `attempt` names this start of the command. A `generation` above
    0 adds to the one before.
    """

    output: str
    run_folder: str
    name: str
    rules: ReadingRules
    num_buckets: int
    shard_bytes: int
    keep_text: bool
    shuffle: Shuffle
    student: StoredTokenizer
    teacher: StoredTokenizer
    tokenizer_records: tuple[TokenizerRecord, TokenizerRecord]
    configuration: Mapping[str, Any]
    attempt: str
    generation: int = 0
    chats: JobChats | None = None

    @property
    def prefix(self) -> str:
        """Of its shards' names."""
        return f"{self.name}-g{self.generation:03d}" if self.generation else self.name

    @property
    def dead_letters_file(self) -> str:
        """File name of its dead letters."""
        stem, suffix = DEAD_LETTERS_FILE.split(".")
        part = f"-g{self.generation:03d}" if self.generation else ""
        return f"{stem}{part}.{suffix}"


@dataclass(frozen=True)
class BucketTar:
    """One finished tar of a bucket, by its temporary names in the run's folder.

    `shard` has these names until shards are numbered.
    """

    tar: str
    index: str
    shard: ShardRecord
    statistics: Mapping[str, Any]


@dataclass(frozen=True)
class BucketRecord:
    """A bucket's commit record, written last.

    `control_strings` counts texts by their first. `digest` covers all input. `dead_letters` is a
    file in the run's folder, or "".
    """

    bucket: Count
    digest: str
    tars: tuple[BucketTar, ...]
    dead_letters: str
    dead_letters_bytes: Count
    by_reason: Mapping[str, Count]
    control_strings: Mapping[str, Count]
    attempt: str

    @property
    def files(self) -> dict[str, int]:
        """Bytes of temporary files, by name."""
        sizes = {self.dead_letters: self.dead_letters_bytes} if self.dead_letters else {}
        for tar in self.tars:
            sizes |= {tar.tar: tar.shard.num_bytes, tar.index: tar.shard.index_num_bytes}
        return sizes


def number_shards(records: Iterable[BucketRecord], prefix: str) -> list[BucketRecord]:
    """Sort records by bucket; name their shards PREFIX-i-of-n."""
    ordered = sorted(records, key=lambda record: record.bucket)
    total = sum(len(record.tars) for record in ordered)
    number = count()
    return [
        replace(record, tars=tuple(_name(tar, prefix, next(number), total) for tar in record.tars))
        for record in ordered
    ]


def _name(tar: BucketTar, prefix: str, number: int, total: int) -> BucketTar:
    stem = f"{prefix}-{number:06d}-of-{total:06d}"
    shard = replace(tar.shard, file=f"{stem}.tar", index_file=f"{stem}.index.parquet")
    return replace(tar, shard=shard)


def choose_shuffle(options: AlignOptions) -> Shuffle:
    """How texts travel: in files if workers share a file system."""
    if options.shuffle != "auto":
        return options.shuffle
    return "files" if storage.is_local(options.output) else "runner"


def estimate_memory(shard_bytes: int, *, keep_text: bool, longest_document: int) -> int:
    """Estimate a process's peak bytes of memory, with mapped files."""
    bucket = shard_bytes // (SAMPLE_BYTES_PER_TEXT_BYTE + keep_text)
    return BASE_MEMORY + 3 * bucket + MEMORY_PER_DOCUMENT_BYTE * longest_document


def estimate_disk(text_bytes: int, *, keep_text: bool, shuffle: Shuffle) -> int:
    """Estimate a job's peak bytes on its output's disk."""
    return text_bytes * (SAMPLE_BYTES_PER_TEXT_BYTE + keep_text + (shuffle == "files"))
