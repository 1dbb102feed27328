"""The library path as a process of its own: JSON lines in, one tar shard and its index out.

    python benchmarks/library_path.py --input a.jsonl --output FOLDER --student S --teacher T

What the align job does less Beam, the shuffle, the manifest and the report.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from corpus import read_documents

from beam_jobs.align.buckets import BATCH_BYTES
from beam_jobs.storage import open_shard_to_write
from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.dataset.writing import ShardWriter, WrittenShard
from pipeline.tokenization import Tokenizer, load_tokenizer
from schemas.index import encode_index


def align_files(
    files: Sequence[Path], student: Tokenizer, teacher: Tokenizer, folder: Path
) -> WrittenShard:
    """Read documents, tokenize them twice, align them, and write a shard with its index."""
    with open_shard_to_write(str(folder / "library.tar")) as output:
        writer = ShardWriter(output)
        for batch in batches(read_documents(files)):
            documents = [SourceDocument(name, text) for name, text in batch]
            writer.add(align_batch(documents, student, teacher))
        written = writer.close()
    (folder / "library.index.parquet").write_bytes(encode_index(written.index))
    return written


def batches(
    documents: Iterable[tuple[str, bytes]], batch_bytes: int = BATCH_BYTES
) -> Iterator[list[tuple[str, bytes]]]:
    """Yield documents in batches of the size that the align job uses."""
    batch: list[tuple[str, bytes]] = []
    num_bytes = 0
    for name, text in documents:
        batch.append((name, text))
        num_bytes += len(text)
        if num_bytes >= batch_bytes:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def main() -> None:
    """Align some files and say how many student tokens they hold."""
    parser = argparse.ArgumentParser(description="Align JSON lines files without Beam.")
    parser.add_argument("--input", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizers = load_tokenizer(options.student), load_tokenizer(options.teacher)
    written = align_files(options.input, *tokenizers, options.output)
    print(written.index.num_student_tokens.sum())


if __name__ == "__main__":
    main()
