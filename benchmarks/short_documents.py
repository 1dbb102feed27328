"""What short documents cost on disk: one member each, as today, against groups in one member.

    python benchmarks/short_documents.py [--student …] [--teacher …] [--documents 4096]

Real text is cut into documents of exactly so many bytes (less what is missing to a character's
end). Each set is written twice: as the format does, and with the documents of a group in one
safetensors file: their arrays behind one another, their bounds, ids and hashes as arrays too. Both
with their index, both without text. Every grouped array is read back and compared.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from io import BytesIO
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
from align import find_tokenizer_file
from corpus import documents
from numpy.typing import NDArray

from pipeline.alignment import align_batch
from pipeline.batches import AlignedBatch, SourceDocument, TokenBatch
from pipeline.dataset.writing import ShardWriter
from pipeline.tokenization import load_tokenizer
from schemas.index import ShardIndex, encode_index

LENGTHS = (22, 100, 300, 1000)
GROUPS = (16, 64, 256)
TAR_BLOCK = 512

Arrays = dict[str, NDArray[np.generic]]


def main() -> int:
    """Print bytes a student token of both layouts for each length."""
    options = parse_arguments()
    student, teacher = load_tokenizer(str(options.student)), load_tokenizer(str(options.teacher))
    print(f"{options.documents} documents of each length, no text kept; bytes a student token")
    heads = "".join(f"{f'groups of {size}':>16}" for size in GROUPS)
    print(f"{'bytes':>8}{'tokens':>8}{'one each':>12}{heads}{'of which index':>20}")
    for length in LENGTHS:
        batch = align_batch(list(islice(cut(length), options.documents)), student, teacher)
        shard, index = write_single(batch)
        single = shard + len(encode_index(index))
        grouped = [measure_groups(batch, index, size) for size in GROUPS]
        num_tokens = len(batch.student.input_ids)
        columns = "".join(f"{sum(sizes) / num_tokens:>16.2f}" for sizes in grouped)
        own, their = len(encode_index(index)) / num_tokens, grouped[-1][1] / num_tokens
        mean = num_tokens / len(batch.documents)
        print(
            f"{length:>8}{mean:>8.1f}{single / num_tokens:>12.2f}{columns}{own:>12.2f}{their:>8.2f}"
        )
    return 0


def cut(num_bytes: int) -> Iterator[SourceDocument]:
    """Yield documents of `num_bytes` from real ones, with ids as a job makes them."""
    for _, name, text in documents():
        data = text.encode()
        for start in range(0, len(data) - num_bytes, num_bytes):
            part = data[start : start + num_bytes].decode("utf-8", "ignore").encode()
            yield SourceDocument(f"{name}:{start}", part)


def write_single(batch: AlignedBatch) -> tuple[int, ShardIndex]:
    """Return the size of a shard of today and its index."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shard.tar")
        with path.open("wb") as file:
            writer = ShardWriter(file)
            writer.add(batch)
            written = writer.close()
        return path.stat().st_size, written.index


def measure_groups(batch: AlignedBatch, index: ShardIndex, size: int) -> tuple[int, int]:
    """Return the bytes of all members with so many documents each, and of their index."""
    payloads = []
    for first in range(0, len(batch.documents), size):
        arrays = group_arrays(batch, first, min(first + size, len(batch.documents)))
        payload = safetensors.numpy.save(arrays, metadata={"schema_version": "2"})
        require_same(arrays, safetensors.numpy.load(payload))
        payloads.append(payload)
    members = sum(TAR_BLOCK - (-len(payload) // TAR_BLOCK) * TAR_BLOCK for payload in payloads)
    return members, len(group_index(index, size, payloads))


def group_arrays(batch: AlignedBatch, first: int, last: int) -> Arrays:
    """Return the tensors of one grouped member."""
    chosen = batch.documents[first:last]
    ids = [document.document_id.encode() for document in chosen]
    arrays: Arrays = {
        "document.id_bytes": narrow(np.array([len(name) for name in ids])),
        "document.ids": np.frombuffer(b"".join(ids), np.uint8),
        "document.text_bytes": narrow(np.array([len(document.text) for document in chosen])),
        "document.text_sha256": hashes(chosen),
    }
    for side, tokens in (("student", batch.student), ("teacher", batch.teacher)):
        arrays |= token_arrays(side, tokens, first, last)
    spans = batch.teacher_spans[slice(*batch.student.cu_tokens[[first, last]])].astype(np.int64)
    starts = batch.student.cu_tokens[first:last] - batch.student.cu_tokens[first]
    advance = np.diff(spans[:, 0], prepend=0)
    inner = starts[starts < len(spans)]  # a document's spans count from its own first token
    advance[inner] = spans[inner, 0]
    return arrays | {
        "span.advance": narrow(advance),
        "span.width": narrow(spans[:, 1] - spans[:, 0]),
    }


def token_arrays(side: str, tokens: TokenBatch, first: int, last: int) -> Arrays:
    """Return ids, counts, and lengths of tokens; ranges for documents that they don't tile."""
    cu_tokens = tokens.cu_tokens[first : last + 1]
    chosen = slice(cu_tokens[0], cu_tokens[-1])
    tiles = np.repeat(tokens.tiles[first:last], np.diff(cu_tokens))
    offsets = tokens.byte_offsets[chosen]
    arrays: Arrays = {
        f"{side}.num_tokens": narrow(np.diff(cu_tokens)),
        f"{side}.input_ids": narrow(tokens.input_ids[chosen]),
        f"{side}.token_bytes": narrow((offsets[:, 1] - offsets[:, 0])[tiles]),
    }
    if not tiles.all():
        arrays[f"{side}.tiles"] = tokens.tiles[first:last].astype(np.uint8)
        arrays[f"{side}.byte_offsets"] = narrow(offsets[~tiles])
    return arrays


def hashes(chosen: Sequence[SourceDocument]) -> NDArray[np.uint8]:
    """Return uint8 [D, 32], the texts' SHA-256."""
    digests = b"".join(sha256(document.text).digest() for document in chosen)
    return np.frombuffer(digests, np.uint8).reshape(-1, 32)


def narrow(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return values in the narrowest unsigned dtype that holds them."""
    largest = int(values.max(initial=0))
    return values.astype(np.uint8 if largest < 256 else np.uint16 if largest < 65536 else np.uint32)


def group_index(index: ShardIndex, size: int, payloads: Sequence[bytes]) -> bytes:
    """Return an index with a row per document, its key left out and its member's row repeated."""
    member = np.arange(len(index)) // size
    num_bytes = np.array([len(payload) for payload in payloads])
    blocks = TAR_BLOCK - (-num_bytes // TAR_BLOCK) * TAR_BLOCK
    columns = {
        "document_id": index.document_id,
        "payload_offset": (np.cumsum(blocks) - blocks + TAR_BLOCK)[member].astype(np.uint64),
        "payload_bytes": num_bytes[member].astype(np.uint32),
        "payload_crc32": np.array([crc32(payload) for payload in payloads], np.uint32)[member],
        "crc32": pa.array(index.crc32.astype(np.uint32)),
        "num_text_bytes": index.num_text_bytes,
        "num_student_tokens": index.num_student_tokens,
        "num_teacher_tokens": index.num_teacher_tokens,
        "cut_student": lists(index.cut_student, index.cut_starts),
        "cut_teacher": lists(index.cut_teacher, index.cut_starts),
    }
    output = BytesIO()
    pq.write_table(pa.table(columns), output, compression="zstd")
    return output.getvalue()


def lists(values: NDArray[np.generic], starts: NDArray[np.generic]) -> pa.Array:
    """Return one list per document."""
    return pa.ListArray.from_arrays(
        pa.array(starts.astype(np.int32)), pa.array(values.astype(np.uint32))
    )


def require_same(arrays: Arrays, found: Arrays) -> None:
    """Check that a member was read back as it was written."""
    for name, values in arrays.items():
        if not np.array_equal(values, found[name]):
            raise SystemExit(f"{name} was read back with other values")


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--student", help="tokenizer (default: Llama 2's, or the nearest here)")
    parser.add_argument("--teacher", help="tokenizer (default: Qwen2.5's, or the nearest here)")
    parser.add_argument("--documents", type=int, default=4096, help="of each length")
    options = parser.parse_args()
    options.student = options.student or find_tokenizer_file("llama2")
    options.teacher = options.teacher or find_tokenizer_file("qwen2_5")
    return options


if __name__ == "__main__":
    sys.exit(main())
