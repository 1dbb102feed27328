"""Small datasets written without the library's own writer: one obvious sample, tar and index each.

Every token id of a dataset is different, so that a test can tell exactly which tokens it has seen.
"""

import io
import json
import tarfile
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np

from pipeline.packing.plan import plan_rows
from pipeline.streaming import AlignedRows, Reading, StreamConfig, load_batches
from pipeline.streaming.damage import QuarantinedSample
from schemas.document import AlignedDocument, Tokens, document_key
from schemas.index import CUT_STRIDE, ShardIndex, encode_index
from schemas.manifest import (
    ConventionRecord,
    DeadLetterRecord,
    Manifest,
    ShardRecord,
    encode_manifest,
)
from tests.support.manifests import STUDENT
from tests.support.reference import reference_spans
from tests.support.sample_encoder import encode_document

STUDENT_BOS, STUDENT_EOS, TEACHER_EOS, FIRST_ID = 1, 2, 3, 10
GLOBAL_BATCH_SIZE = 12


@dataclass(frozen=True)
class SmallDataset:
    """A dataset on disk and the documents in it, in order."""

    folder: Path
    manifest: Manifest
    documents: list[AlignedDocument]


def make_documents(lengths, *, seed=0):
    """Return documents with the given student lengths and ids that occur once."""
    rng = np.random.default_rng(seed)
    documents, student_id, teacher_id = [], FIRST_ID, FIRST_ID
    for number, length in enumerate(lengths):
        student_bytes = rng.integers(1, 6, length)
        num_bytes = int(student_bytes.sum())
        teacher_bytes = _tile(rng, num_bytes)
        student = _tokens(student_bytes, student_id)
        teacher = _tokens(teacher_bytes, teacher_id)
        student_id, teacher_id = student_id + length, teacher_id + len(teacher)
        spans = brute_force_spans(student.byte_offsets, teacher.byte_offsets)
        spans[rng.random(length) < 0.05] = 0
        documents.append(
            AlignedDocument(
                f"doc-{number}", sha256(b"").hexdigest(), num_bytes, student, teacher, spans
            )
        )
    return documents


def write_dataset(folder, documents, *, shard_sizes):
    """Write documents as shards of the given numbers of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    records, start = [], 0
    for shard, size in enumerate(shard_sizes):
        name = f"data-{shard:06d}-of-{len(shard_sizes):06d}"
        records.append(_write_shard(folder, name, documents[start : start + size]))
        start += size
    manifest = Manifest(
        name="data",
        student=_tokenizer("student", STUDENT_BOS, STUDENT_EOS, adds_bos=True),
        teacher=_tokenizer("teacher", None, TEACHER_EOS, adds_bos=False),
        shards=tuple(records),
        dead_letters=DeadLetterRecord("dead_letters.jsonl", sha256(b"").hexdigest(), 0, {}),
        configuration={},
        statistics={},
    )
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    return SmallDataset(folder, manifest, documents[:start])


def small_rows(path, **options):
    """Open rows of 64 student tokens, 12 to a global batch."""
    defaults = {"seq_length": 64, "teacher_seq_length": 96, "window_rows": 5, "shuffle_shards": 1}
    defaults["global_batch_size"] = GLOBAL_BATCH_SIZE
    return AlignedRows(StreamConfig(Reading(str(path)), **(defaults | options)))


def read_run(rows, num_samples, *, num_replicas, consumed_samples=0, **options):
    """Return rows by run position, as tuples, read by all replicas."""
    options = {"micro_batch_size": GLOBAL_BATCH_SIZE // num_replicas} | options
    found = {}
    for replica in range(num_replicas):
        loader = load_batches(
            rows,
            replica=replica,
            num_replicas=num_replicas,
            consumed_samples=consumed_samples,
            num_samples=num_samples,
            **options,
        )
        for positions, batch in zip(loader.batches, loader, strict=True):
            found |= dict(zip(positions, map(tuple, batch.buffer.tolist()), strict=True))
    assert sorted(found) == list(range(consumed_samples, num_samples))
    return found


def brute_force_spans(student, teacher):
    """Return the minimal run of teacher tokens that overlaps each student token."""
    spans = reference_spans(student.tolist(), teacher.tolist())
    return np.array([span or (0, 0) for span in spans], np.int64).reshape(-1, 2)


def brute_force_cuts(document):
    """Return the last shared boundary of every CUT_STRIDE student tokens."""
    ends = {int(end): j + 1 for j, end in enumerate(document.teacher.byte_offsets[:, 1])}
    cuts = {}
    for i, end in enumerate(document.student.byte_offsets[:, 1].tolist()):
        if end in ends:
            cuts[i // CUT_STRIDE] = (i + 1, ends[end])
    return sorted(cuts.values())


def make_index(documents, offsets, samples):
    """Return the index of samples that start at the given bytes of their tar."""
    sizes = [[len(getattr(d, side)) for d in documents] for side in ("student", "teacher")]
    return replace(
        index_of(*sizes, map(brute_force_cuts, documents)),
        key=[document_key(document.document_id) for document in documents],
        document_id=[document.document_id for document in documents],
        payload_offset=np.array(offsets, np.int64),
        payload_bytes=np.array([len(sample) for sample in samples], np.int64),
        crc32=np.array([crc32(sample) for sample in samples], np.int64),
        num_text_bytes=np.array([document.num_text_bytes for document in documents], np.int64),
        num_mapped=np.array([np.count_nonzero(np.diff(d.teacher_spans)) for d in documents]),
        byte_iou_sum=np.zeros(len(documents), np.float32),
    )


def _write_shard(folder, name, documents):
    samples = [encode_document(document) for document in documents]
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for document, sample in zip(documents, samples, strict=True):
            member = tarfile.TarInfo(document_key(document.document_id) + ".safetensors")
            member.size = len(sample)
            tar.addfile(member, io.BytesIO(sample))
    tar_bytes = sink.getvalue()
    with tarfile.open(fileobj=io.BytesIO(tar_bytes)) as tar:
        index = make_index(documents, [member.offset_data for member in tar], samples)
    index = encode_index(index)
    (folder / f"{name}.tar").write_bytes(tar_bytes)
    (folder / f"{name}.index.parquet").write_bytes(index)
    return ShardRecord(
        file=f"{name}.tar",
        num_bytes=len(tar_bytes),
        sha256=sha256(tar_bytes).hexdigest(),
        index_file=f"{name}.index.parquet",
        index_num_bytes=len(index),
        index_sha256=sha256(index).hexdigest(),
        num_documents=len(documents),
        num_text_bytes=sum(document.num_text_bytes for document in documents),
        num_student_tokens=sum(len(document.student) for document in documents),
        num_teacher_tokens=sum(len(document.teacher) for document in documents),
    )


def _tile(rng, num_bytes):
    cuts = np.flatnonzero(rng.random(max(0, num_bytes - 1)) < 0.3) + 1
    return np.diff(np.concatenate([[0], cuts, [num_bytes]])) if num_bytes else np.empty(0, int)


def _tokens(token_bytes, first_id):
    ends = np.cumsum(token_bytes)
    offsets = np.stack([ends - token_bytes, ends], axis=1).astype(np.int64)
    return Tokens(np.arange(first_id, first_id + len(token_bytes), dtype=np.int64), offsets)


def _tokenizer(side, bos, eos, *, adds_bos):
    own = {"source": side, "file": f"tokenizers/{side}/tokenizer.json", "vocab_size": 1 << 20}
    own |= {"sha256": sha256(side.encode()).hexdigest(), "adds_bos": adds_bos}
    return replace(STUDENT, bos_token_id=bos, eos_token_id=eos, **own)


def around(first=None, continued=None, end=None):
    return ConventionRecord(first, continued, end)


def plan_indices(indices, rules):
    """Return the rows of all documents of some shards."""
    return plan_rows(lambda split: [split(index, None) for index in indices], rules)


def index_of(num_student, num_teacher, cuts):
    """Return an index with the given token counts and cut points of each document."""
    zeros, cuts = np.zeros(len(num_student), np.int64), list(cuts)
    flat = np.array([cut for each in cuts for cut in each], np.int64).reshape(-1, 2)
    return ShardIndex(
        key=(),
        document_id=(),
        payload_offset=zeros,
        payload_bytes=zeros,
        crc32=zeros,
        num_text_bytes=zeros,
        num_student_tokens=np.array(num_student, np.int64),
        num_teacher_tokens=np.array(num_teacher, np.int64),
        cut_starts=np.cumsum([0, *map(len, cuts)], dtype=np.int64),
        cut_student=flat[:, 0],
        cut_teacher=flat[:, 1],
    )


def read_quarantine(file):
    """Return the samples that a file lists, each once, in the order they were met."""
    lines = file.read_text().splitlines() if file.exists() else []
    samples = [QuarantinedSample(**json.loads(line)) for line in lines]
    return list({(sample.shard, sample.key): sample for sample in samples}.values())
