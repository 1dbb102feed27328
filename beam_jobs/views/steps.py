"""The steps of the job that makes a view: a shard an element, two files each.

Each can run twice, or on two workers at once, without harm: a file gets its final name by an atomic
rename and equal bytes replace it, and a shard's commit record comes after its files.
"""

import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics

from beam_jobs import storage
from beam_jobs.progress import worker_progress
from beam_jobs.runs import read_commit, require_shared
from beam_jobs.tokenizer_files import StoredTokenizer, load_stored
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.texts import find_text
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.dataset.view_writing import ViewWriter, view_file_record
from schemas.document import AlignedDocument, decode_document
from schemas.index import ShardIndex
from schemas.manifest import ShardRecord, ViewFileRecord
from schemas.records import Count, read_record, write_record
from schemas.view_file import Side, view_file_names
from schemas.view_index import encode_view_index

SHARDS_FILE = "shards.json"
"""In the run's folder: what became of each shard."""

BATCH_BYTES = 2 << 20
"""Text that is tokenized at once."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ViewJob:
    """Everything a worker needs to know; plain values only.

    Attributes:
        output: the dataset's folder.
        run_folder: of this view's run, inside `output`.
        dataset: fingerprint of the dataset.
        name: the view's.
        side: whose tokens it replaces.
        tokenizer: with which.
    """

    output: str
    run_folder: str
    dataset: str
    name: str
    side: Side
    tokenizer: StoredTokenizer


@dataclass(frozen=True)
class ShardSeen:
    """What became of one shard; also its commit record.

    Attributes:
        shard: its number.
        num_documents: in it.
        record: of the two files; None where a text is missing, and they were not written.
        statistics: JSON of their `AlignmentStatistics`.
        num_without_text: documents whose text can't be had.
        without_text: the id of the first of them.
        reused: whether an earlier attempt had done it.
    """

    shard: Count
    num_documents: Count
    record: ViewFileRecord | None
    statistics: Mapping[str, Any]
    num_without_text: Count = 0
    without_text: str = ""
    reused: bool = False

    def to_json(self) -> str:
        """Return it as one line."""
        return write_record(self)

    @staticmethod
    def from_json(data: str | bytes) -> "ShardSeen":
        """Return what `to_json` gave.

        Raises:
            RecordError: another release, with other fields, wrote it.
        """
        return read_record(data, ShardSeen)


class AddShard(beam.DoFn):
    """Shard number -> `ShardSeen` as JSON; the shard's two files are in place by then."""

    num_tokens = Metrics.counter("vocag", "view_tokens")

    def __init__(self, job: ViewJob) -> None:
        """Hold the job; it travels to the workers with the step."""
        self._job = job
        self._dataset: Dataset | None = None

    def setup(self) -> None:
        """Open the dataset, and check that it is the job's."""
        require_shared(self._job.run_folder)
        self._dataset = open_dataset(self._job.output)
        found, expected = self._dataset.manifest.fingerprint, self._job.dataset
        if found != expected:
            raise ValueError(
                f"dataset {self._job.output} is {found[:16]}… on this worker, the job started with "
                f"{expected[:16]}…: it has changed, or this machine holds another; run the same "
                "command again"
            )

    def process(self, element: str) -> Iterator[str]:
        """Yield what became of a shard."""
        assert self._dataset is not None
        seen = find_commit(int(element), self._job, self._dataset)
        if seen is None:
            seen = add_shard(int(element), self._job, self._dataset)
        self.num_tokens.inc(0 if seen.record is None else seen.record.num_tokens)
        yield seen.to_json()

    def finish_bundle(self) -> None:
        """Show the last counts."""
        worker_progress(self._job.run_folder).flush()


class WriteShards(beam.DoFn):
    """(0, all shards) -> the path of their list, from which the launcher makes the manifest."""

    def __init__(self, job: ViewJob) -> None:
        """Hold the job."""
        self._job = job

    def process(self, element: tuple[int, Iterable[str]]) -> Iterator[str]:
        """Write the list."""
        seen = {shard.shard: shard for shard in map(ShardSeen.from_json, element[1])}
        path = storage.join(self._job.run_folder, SHARDS_FILE)
        lines = [json.loads(seen[number].to_json()) for number in sorted(seen)]
        data = json.dumps(lines).encode()
        storage.write_atomically(path, data, scratch=self._job.run_folder)
        yield path


def read_shards(job: ViewJob) -> list[ShardSeen]:
    """Return what became of all shards, in order."""
    data = storage.read_bytes(storage.join(job.run_folder, SHARDS_FILE))
    return read_record(data, list[ShardSeen])


def find_commit(shard: int, job: ViewJob, dataset: Dataset) -> ShardSeen | None:
    """Return what an earlier attempt made of a shard, if it is still whole."""
    path = storage.join(job.run_folder, _commit_name(shard))
    seen = read_commit(path, ShardSeen)
    if seen is None:
        return None
    record, shard_record = seen.record, dataset.manifest.shards[shard]
    if record is None or record.shard_sha256 != shard_record.sha256:
        return None
    if not are_there(record, job.output):
        return None
    worker_progress(job.run_folder).add(reused_tokens=_other_tokens(shard_record, job.side))
    return ShardSeen(shard, seen.num_documents, record, seen.statistics, reused=True)


def are_there(record: ViewFileRecord, output: str) -> bool:
    """Return whether both files of a shard's view have the sizes that they should."""
    sizes = {record.file: record.num_bytes, record.index_file: record.index_num_bytes}
    return all(storage.num_bytes_of(storage.join(output, n)) == size for n, size in sizes.items())


def add_shard(shard: int, job: ViewJob, dataset: Dataset) -> ShardSeen:
    """Tokenize and align a shard's documents, write the view's two files and, last, the commit.

    Raises:
        DatasetError: the shard is damaged.
    """
    shard_record = dataset.manifest.shards[shard]
    index = dataset.read_index(shard, with_names=True)
    progress = worker_progress(job.run_folder)
    other = _other_tokens(shard_record, job.side) / max(1, len(index))
    names = view_file_names(shard_record.file, job.name)
    temporary = storage.join(job.run_folder, f"{uuid.uuid4().hex}.bin")
    missing: list[str] = []
    with storage.open_shard_to_write(temporary) as file:
        writer = ViewWriter(file, load_stored(job.tokenizer), job.side)
        for documents, texts in _batches(dataset, shard, index):
            known = [text for text in texts if text is not None]
            lost = [d.document_id for d, text in zip(documents, texts, strict=True) if text is None]
            missing += lost
            if not missing:
                writer.add(documents, known)
            progress.add(
                scored_documents=len(documents), scored_tokens=round(other * len(documents))
            )
        written = writer.close()
    if missing:
        storage.delete_files(job.run_folder, [temporary.rsplit("/", 1)[1]])
        return ShardSeen(shard, len(index), None, {}, len(missing), missing[0])
    data = encode_view_index(written.index)
    index_path = storage.join(job.output, names[1])
    storage.write_atomically(index_path, data, scratch=job.run_folder)
    final = storage.join(job.output, names[0])
    storage.publish(temporary, final, written.num_bytes, scratch=job.run_folder)
    record = view_file_record(written, shard_record, names, data)
    seen = ShardSeen(shard, len(index), record, written.statistics.to_json())
    path = storage.join(job.run_folder, _commit_name(shard))
    storage.write_atomically(path, seen.to_json().encode(), scratch=job.run_folder)
    return seen


def text_of(document: AlignedDocument, dataset: Dataset) -> bytes | None:
    """Return a document's text: kept, or spelled by the student's tokens or by the teacher's."""
    records = {side: getattr(dataset.manifest, side) for side in ("student", "teacher")}
    load = partial(load_dataset_tokenizer, dataset.location)
    return find_text(document, {side: partial(load, record) for side, record in records.items()})


def _batches(
    dataset: Dataset, shard: int, index: ShardIndex
) -> Iterator[tuple[list[AlignedDocument], list[bytes | None]]]:
    """Yield a shard's documents and their texts, some at a time."""
    documents: list[AlignedDocument] = []
    texts: list[bytes | None] = []
    num_bytes = 0
    for _, sample in dataset.samples(shard, index, with_removed=True):
        document = decode_document(sample)
        documents.append(document)
        texts.append(text_of(document, dataset))
        num_bytes += document.num_text_bytes
        if num_bytes >= BATCH_BYTES:
            yield documents, texts
            documents, texts, num_bytes = [], [], 0
    if documents:
        yield documents, texts


def _other_tokens(shard: ShardRecord, side: Side) -> int:
    """Return a shard's tokens of the side that stays."""
    return shard.num_student_tokens if side == "teacher" else shard.num_teacher_tokens


def _commit_name(shard: int) -> str:
    return f"commit-{shard:06d}.json"
