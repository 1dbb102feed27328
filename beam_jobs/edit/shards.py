"""One shard, copied without some of its documents."""

from dataclasses import replace
from hashlib import sha256
from tarfile import USTAR_FORMAT, TarInfo
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from beam_jobs import storage
from beam_jobs.edit.copying import copy_parts, require_same
from pipeline.alignment.quality import AlignmentStatistics, measure_documents
from pipeline.batches import AlignedBatch, SourceDocument, TokenBatch
from pipeline.dataset.encoding import TAR_BLOCK
from pipeline.dataset.files import Dataset
from pipeline.dataset.writing import END_OF_TAR, WrittenShard, shard_record
from schemas.document import Tokens, decode_document
from schemas.errors import SchemaVersionError
from schemas.index import encode_index, take_documents
from schemas.manifest import ShardRecord


def copy_shard(dataset: Dataset, shard_index: int, output: str, stem: str) -> ShardRecord:
    """Write a shard, less the documents that are removed, and its index.

    Args:
        dataset: whose shard it is.
        shard_index: its number.
        output: the new dataset's folder.
        stem: the new shard's name, without suffix.

    Raises:
        DamagedShardError: the shard, or its index, is not the manifest's.
        DamagedSampleError: a sample is altered.
        SchemaVersionError: documents are removed from a shard of version 1.

    Example:
        >>> copy_shard(dataset, 0, "clean", "corpus-000000-of-000001").num_documents
        1000
    """
    removed = dataset.removed_of(shard_index)
    tar, index_file = f"{stem}.tar", f"{stem}.index.parquet"
    with storage.open_shard_to_write(storage.join(output, tar)) as sink:
        if not len(removed):
            with dataset.open_shard(shard_index) as file:
                num_bytes = dataset.manifest.shards[shard_index].num_bytes
                copied = copy_parts(file, sink, [(num_bytes, True)])
            require_same(copied.source_sha256, dataset.shard(shard_index), "shard")
            data = dataset.index_bytes(shard_index)
            record = dataset.manifest.shards[shard_index]
            record = replace(record, file=tar, index_file=index_file)
        else:
            written = _copy_some(dataset, shard_index, removed, sink)
            data = encode_index(written.index)
            record = shard_record(written, tar, index_file, data)
    with storage.open_to_write(storage.join(output, index_file)) as file:
        file.write(data)
    return record


def measure_removed(dataset: Dataset, shard_index: int) -> AlignmentStatistics:
    """Return the statistics of a shard's removed documents, as the dataset is seen.

    Those that the view's tokenizer can't tokenize are in no statistics of the view.

    Raises:
        DatasetError: the shard is damaged.

    Example:
        >>> measure_removed(dataset, 0).num_documents
        2
    """
    removed = dataset.removed_of(shard_index)
    if dataset.view is not None:
        removed = np.setdiff1d(removed, dataset.read_view_index(shard_index).left_out)
    if not len(removed):
        return AlignmentStatistics.empty()
    index = dataset.read_index(shard_index, with_names=True)
    parts = []
    places = removed.tolist()
    samples = dataset.samples(shard_index, index, documents=places, with_removed=True)
    for place, payload in samples:
        document = decode_document(payload)
        sides = (_batch(document.student), _batch(document.teacher))
        source = SourceDocument(document.document_id, b"")
        measured, _ = measure_documents(AlignedBatch([source], *sides, document.teacher_spans))
        parts.append(replace(measured, num_text_bytes=int(index.num_text_bytes[place])))
    return AlignmentStatistics.merge(parts)


def _copy_some(
    dataset: Dataset, shard_index: int, removed: NDArray[np.int64], sink: BinaryIO
) -> WrittenShard:
    index = dataset.read_index(shard_index, with_names=True)
    if len(index.num_mapped) != len(index):
        name = dataset.manifest.shards[shard_index].file
        raise SchemaVersionError(f"shard {name}, from which documents are removed,", "1", (2,))
    kept = np.delete(np.arange(len(index)), removed)
    digest, num_bytes, offsets = sha256(), 0, []
    for place, payload in dataset.samples(shard_index, index, documents=kept.tolist()):
        member = TarInfo(f"{index.key[place]}.safetensors")
        member.size = len(payload)
        data = member.tobuf(USTAR_FORMAT) + payload + bytes(-len(payload) % TAR_BLOCK)
        offsets.append(num_bytes + TAR_BLOCK)
        num_bytes += len(data)
        digest.update(data)
        sink.write(data)
    digest.update(END_OF_TAR)
    sink.write(END_OF_TAR)
    left = replace(take_documents(index, kept), payload_offset=np.array(offsets, np.int64))
    size = num_bytes + len(END_OF_TAR)
    return WrittenShard(left, size, digest.hexdigest(), AlignmentStatistics.empty())


def _batch(tokens: Tokens) -> TokenBatch:
    """Return one document's tokens as a batch; whether they tile its text is seen from them."""
    offsets = tokens.byte_offsets
    tiles = bool(np.array_equal(offsets[1:, 0], offsets[:-1, 1]))
    cu_tokens = np.array([0, len(tokens)], np.int64)
    ids = tokens.input_ids.astype(np.uint32)
    return TokenBatch(ids, offsets, cu_tokens, np.array([tiles]))
