"""One bucket: documents in, temporary tars out."""

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import BinaryIO, Self

import msgspec
import orjson

from beam_jobs import storage
from beam_jobs.align.bucket_blocks import BlockStore, Record, holds_taken_ids, key_of, unpack_block
from beam_jobs.align.inputs.documents import DeadLetter, PlacedDocument, Reason
from beam_jobs.align.inputs.metadata import columns_of
from beam_jobs.align.inputs.parts import SAMPLE_BYTES_PER_TEXT_BYTE
from beam_jobs.align.inputs.taken_ids import TakenId
from beam_jobs.align.job import BucketRecord, BucketTar, Job
from beam_jobs.align.job_chats import align_documents
from beam_jobs.job_errors import JobError
from beam_jobs.left_out import DUPLICATE_OF
from beam_jobs.resuming import read_commit
from beam_jobs.running.job_progress import worker_progress
from beam_jobs.tokenizer_files import load_stored
from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.dataset.writing import ShardWriter, shard_record
from schemas.index import encode_index
from schemas.records import write_record

BATCH_BYTES = 2 << 20
"""Text of one call to the library; twice as much is 5 % faster, for twice the memory."""

_align_lock = threading.Lock()


def align_bucket(bucket: int, elements: Iterable[bytes], job: Job) -> BucketRecord:
    """Align a bucket's documents into temporary tars, unless an earlier attempt did.

    `elements` are its blocks, or references to them, in any order. The commit record is also
    written to the run's folder.
    """
    store = BlockStore(job.shuffle, job.run_folder)
    records = unpack(partial(store.fetch, elements))
    records.sort(key=_order)
    digest = _digest(records)
    record = find_commit(bucket, digest, job)
    if record is None:
        record = _write_bucket(bucket, digest, records, job)
        path = storage.join(job.run_folder, _commit_name(bucket))
        storage.write_atomically(path, write_record(record).encode(), scratch=job.run_folder)
    else:
        worker_progress(job.run_folder).add(aligned_documents=len(records))
    return record


def find_commit(bucket: int, digest: str, job: Job) -> BucketRecord | None:
    """An earlier attempt's record of the same documents, if its files are whole."""
    path = storage.join(job.run_folder, _commit_name(bucket))
    record = read_commit(path, BucketRecord)
    if record is None:
        return None
    sizes = {n: storage.num_bytes_of(storage.join(job.run_folder, n)) for n in record.files}
    return record if record.digest == digest and sizes == record.files else None


def encode_dead_letter(letter: DeadLetter) -> bytes:
    """Encode one line of `dead_letters.jsonl`."""
    return orjson.dumps(msgspec.structs.asdict(letter), option=orjson.OPT_APPEND_NEWLINE)


def unpack(read_blocks: Callable[[], Iterable[bytes]]) -> list[Record]:
    """A bucket's records; of many taken ids only those that documents repeat.

    Blocks are read twice if ids are taken: a small input may be added to a huge dataset.
    """
    records: list[Record] = []
    num_taken = 0
    for block in read_blocks():
        if holds_taken_ids(block):
            num_taken += 1
        else:
            records += unpack_block(block)
    if not num_taken:
        return records
    met = {record.document_id for record in records}
    for block in read_blocks():
        if holds_taken_ids(block):
            num_taken -= 1
            records += [record for record in unpack_block(block) if record.document_id in met]
    if num_taken:  # else documents would be there twice, without a word
        raise JobError("the runner gave a bucket's blocks once, and --append reads them twice")
    return records


class _Tars:
    """A bucket's temporary tars.

    Another follows a full one, unless it would be less than a quarter full.
    """

    def __init__(self, bucket: int, job: Job) -> None:
        self.finished: list[BucketTar] = []
        self._job = job
        self._stem = f"bucket-{bucket:06d}-{uuid.uuid4().hex}"
        self._file: BinaryIO | None = None
        self._writer: ShardWriter | None = None
        self._rest = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, batch: AlignedBatch, bytes_left: int) -> None:
        if not batch.documents:
            return
        if self._is_full():
            self.finish()
        if self._writer is None:
            self._file = storage.open_shard_to_write(self._path("tar"))
            self._writer = ShardWriter(
                self._file,
                keep_text=self._job.keep_text,
                metadata=columns_of(self._job.rules.metadata),
            )
        self._writer.add(batch)
        self._rest = bytes_left * SAMPLE_BYTES_PER_TEXT_BYTE

    def finish(self) -> None:
        if self._writer is None or self._file is None:
            return
        written = self._writer.close()
        self._file.close()
        index = encode_index(written.index)
        tar, index_path = self._path("tar"), self._path("index.parquet")
        with storage.open_to_write(index_path) as file:
            file.write(index)
        tar_name, index_name = (path.rsplit("/", 1)[1] for path in (tar, index_path))
        shard = shard_record(written, tar_name, index_name, index)
        statistics = written.statistics.to_json()
        self.finished.append(BucketTar(tar_name, index_name, shard, statistics))
        self._file = self._writer = None

    def _is_full(self) -> bool:
        if self._writer is None or self._rest < self._job.shard_bytes // 4:
            return False
        return self._writer.num_bytes >= self._job.shard_bytes  # waits for the writer

    def _path(self, suffix: str) -> str:
        part = len(self.finished)
        return storage.join(self._job.run_folder, f"{self._stem}-{part:04d}.{suffix}")


def _order(record: Record) -> tuple[str, bool, str, int]:
    """Sort key in a shard: by id, taken ones first, then input order."""
    return key_of(record), not isinstance(record, TakenId), record.source, record.position


def _write_bucket(bucket: int, digest: str, records: Sequence[Record], job: Job) -> BucketRecord:
    documents, letters = _separate(records)
    control_strings = count_control_strings(documents, job)
    progress = worker_progress(job.run_folder)
    progress.add(aligned_documents=len(letters))
    bytes_left = sum(len(document.text) for document in documents)
    with _Tars(bucket, job) as tars:
        for batch in _batches(documents, min(BATCH_BYTES, job.shard_bytes // 16)):
            aligned = _align(batch, job)
            bytes_left -= sum(len(document.text) for document in batch)
            tars.add(aligned, bytes_left)
            letters += _failures(aligned, batch)
            progress.add(
                aligned_documents=len(batch), student_tokens=len(aligned.student.input_ids)
            )
        tars.finish()
        name, num_bytes = _write_letters(bucket, letters, job)
        return BucketRecord(
            bucket,
            digest,
            tuple(tars.finished),
            name,
            num_bytes,
            dict(sorted(Counter(letter.reason.value for letter in letters).items())),
            control_strings,
            job.attempt,
        )


def _separate(records: Iterable[Record]) -> tuple[list[PlacedDocument], list[DeadLetter]]:
    """Split usable documents from dead letters; an id's first stays."""
    documents: list[PlacedDocument] = []
    letters: list[DeadLetter] = []
    first: PlacedDocument | TakenId | None = None  # the id's holder
    for record in records:
        if isinstance(record, DeadLetter):
            letters.append(record)
        elif isinstance(record, TakenId):
            first = record
        elif first is None or first.document_id != record.document_id:
            first = record
            documents.append(record)
        elif isinstance(first, TakenId):
            detail = f"the dataset has the id already: {first.source}#{first.position}"
            letters.append(record.refuse(Reason.KNOWN_ID, detail))
        else:
            detail = f"{DUPLICATE_OF}{first.source}#{first.position}"
            letters.append(record.refuse(Reason.DUPLICATE_ID, detail, first_line=first.line))
    return documents, letters


def _batches(
    documents: Iterable[PlacedDocument], batch_bytes: int
) -> Iterator[list[PlacedDocument]]:
    batch: list[PlacedDocument] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += len(document.text)
        if num_bytes >= batch_bytes:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _align(batch: Sequence[PlacedDocument], job: Job) -> AlignedBatch:
    documents = [SourceDocument(each.document_id, each.text, each.metadata) for each in batch]
    student, teacher = load_stored(job.student), load_stored(job.teacher)
    with _align_lock:  # the tokenizers of a process are shared by its threads
        return align_documents(documents, (student, teacher), job.chats)


def count_control_strings(documents: Iterable[PlacedDocument], job: Job) -> dict[str, int]:
    """Count texts that spell control tokens, by their first."""
    tokenizers = dict.fromkeys((load_stored(job.student), load_stored(job.teacher)))
    patterns = [each.control_strings for each in tokenizers if each.control_strings]
    counts: Counter[str] = Counter()
    for document in documents:
        found = [match for each in patterns if (match := each.search(document.text))]
        if found:
            first = min(found, key=lambda match: (match.start(), -match.end()))
            counts[first[0].decode()] += 1
    return dict(sorted(counts.items()))


def _failures(aligned: AlignedBatch, batch: Sequence[PlacedDocument]) -> list[DeadLetter]:
    by_id = {document.document_id: document for document in batch}
    reasons = {
        Reason.TOKENIZATION_FAILED: aligned.failures,
        Reason.RENDERING_FAILED: aligned.refused,
    }
    return [
        by_id[failed.document_id].refuse(reason, detail)
        for reason, pairs in reasons.items()
        for failed, detail in pairs
    ]


def _write_letters(bucket: int, letters: list[DeadLetter], job: Job) -> tuple[str, int]:
    if not letters:
        return "", 0
    letters.sort(key=lambda letter: (letter.source, letter.position))
    lines = b"".join(map(encode_dead_letter, letters))
    name = f"dead-{bucket:06d}-{uuid.uuid4().hex}.jsonl"
    with storage.open_to_write(storage.join(job.run_folder, name)) as file:
        file.write(lines)
    return name, len(lines)


def _digest(records: Iterable[Record]) -> str:
    digest = sha256()
    for record in records:
        digest.update(msgspec.msgpack.encode(record))
    return digest.hexdigest()


def _commit_name(bucket: int) -> str:
    return f"commit-{bucket:06d}.json"
