"""Small real datasets, built with the library itself, for tests to read and to damage."""

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pipeline.alignment import align_batch
from pipeline.alignment.quality import AlignmentStatistics
from pipeline.batches import SourceDocument
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.conventions import describe_tokenizer
from pipeline.dataset.dataset_reading import read_manifest
from pipeline.dataset.files import open_dataset
from pipeline.dataset.writing import ShardWriter, WrittenShard, shard_record
from pipeline.tokenization import Tokenizer, load_tokenizer
from schemas.document import AlignedDocument, decode_document, document_key
from schemas.index import ShardIndex, decode_index, encode_index
from schemas.manifest import (
    DEAD_LETTERS_FILE,
    MANIFEST_FILE,
    DeadLetterRecord,
    Manifest,
    MetadataColumn,
    MetadataType,
    TokenizerRecord,
    encode_manifest,
)

_SENTENCES = (
    "Probability, Uncertainty and the law of large numbers.",
    "Let x_1, ..., x_n be independent; then E[x_1 + x_2] = E[x_1] + E[x_2].",
    "∑_{i=1}^{n} i = n(n+1)/2, so the sum of 1..100 is 5050.",
    "A fair coin 🪙 is tossed 12 times: what is P(exactly 7 heads)?",
    "数学是科学的语言。 Die Länge der Strecke beträgt 3,14 m.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Natalia sold clips to 48 of her friends in April, and half as many in May.",
    "e\u0301 and é look alike; trailing spaces   \n\n\tand tabs do not.",
)


def make_texts(num_documents: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Return (document id, text) pairs: the same for the same arguments, no two texts alike."""
    choose = random.Random(seed)
    return [
        (
            f"doc-{seed}-{number}",
            f"{number}. " + " ".join(choose.choices(_SENTENCES, k=choose.randint(1, 9))),
        )
        for number in range(num_documents)
    ]


def build_dataset(
    folder: Path,
    texts: Sequence[tuple[str, str]] | None = None,
    *,
    num_shards: int = 3,
    keep_text: bool = True,
    student: Tokenizer | None = None,
    teacher: Tokenizer | None = None,
    name: str = "docs",
    dead_letters: Sequence[tuple[str, str]] = (("lost-1", "empty_text"),),
    configuration: dict[str, Any] | None = None,
    metadata: Mapping[str, MetadataType] | None = None,
    values: Callable[[str], tuple[Any, ...]] = lambda _: (),
) -> Manifest:
    """Write a complete dataset and return its manifest.

    Unless given otherwise of 24 short documents in several scripts, dealt out by key, with
    byte-level BPEs of 400 and 480 ids. Texts are (document id, text) pairs, dead letters (document
    id, reason), metadata a type by field, and `values` gives these fields by a document's id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    student, teacher = student or byte_level(400), teacher or byte_level(480)
    columns = tuple(MetadataColumn(*entry) for entry in (metadata or {}).items())
    documents = [SourceDocument(i, text.encode(), values(i)) for i, text in texts or make_texts(24)]
    records, statistics = [], []
    for number in range(num_shards):
        stem = f"{name}-{number:06d}-of-{num_shards:06d}"
        own = [d for d in documents if int(document_key(d.document_id), 16) % num_shards == number]
        own.sort(key=lambda document: document_key(document.document_id))
        written = _write_shard(folder / f"{stem}.tar", own, student, teacher, keep_text, columns)
        index = encode_index(written.index)
        (folder / f"{stem}.index.parquet").write_bytes(index)
        records.append(shard_record(written, f"{stem}.tar", f"{stem}.index.parquet", index))
        statistics.append(written.statistics)
    manifest = Manifest(
        name=name,
        student=store_tokenizer(folder, "student", student),
        teacher=store_tokenizer(folder, "teacher", teacher),
        shards=tuple(records),
        dead_letters=_write_dead_letters(folder, dead_letters),
        configuration={"keep_text": keep_text} if configuration is None else configuration,
        statistics=AlignmentStatistics.merge(statistics).to_json(),
        metadata=columns,
    )
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return manifest


def files_of(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, by their names relative to it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def seen_ids(folder: Path, generation: int | None = None) -> set[str]:
    """Return the ids of the documents that a reader sees."""
    dataset = open_dataset(str(folder), generation=generation)
    found: set[str] = set()
    for shard, kept in enumerate(select_documents(dataset).each(lambda _, kept: kept)):
        names = np.array(dataset.read_ids(shard).to_pylist())
        found |= set(names.tolist() if kept is None else names[kept].tolist())
    return found


def read_documents(folder: Path) -> dict[str, AlignedDocument]:
    """Return all documents of a dataset, by their ids."""
    dataset, found = open_dataset(str(folder)), {}
    for shard in range(len(dataset.manifest.shards)):
        index = dataset.read_index(shard, with_names=True)
        for place, sample in dataset.samples(shard, index):
            found[index.document_id[place]] = decode_document(sample)
    return found


def remove_documents(folder: Path, *ids: str) -> Manifest:
    """Let a dataset's next generation leave documents out; return its manifest."""
    # Beam: seconds, and for few tests
    from beam_jobs.remove.options import RemoveOptions
    from beam_jobs.remove.removal import remove

    listing = folder.with_name(f"{folder.name}-removed.txt")
    listing.write_text("\n".join(ids), "utf-8")
    return remove(RemoveOptions(str(folder), str(listing), quiet=True))


def flip(path: Path, position: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def edit_sample(folder: Path, shard: int, row: int, change: Callable[[bytes], bytes]) -> None:
    """Replace a payload by another of the same size, with CRC-32 and hashes made to fit."""
    record = read_manifest(str(folder)).shards[shard]
    index = decode_index((folder / record.index_file).read_bytes())
    start, size = int(index.payload_offset[row]), int(index.payload_bytes[row])
    data = bytearray((folder / record.file).read_bytes())
    payload = change(bytes(data[start : start + size]))
    assert len(payload) == size
    data[start : start + size] = payload
    (folder / record.file).write_bytes(data)
    crc32 = index.crc32.copy()
    crc32[row] = zlib.crc32(payload)
    record_shard(folder, shard, replace(index, crc32=crc32))


def record_shard(folder: Path, shard: int, index: ShardIndex) -> None:
    """Make the manifest name a shard's files as they are now: a liar that hashes its lies."""
    manifest = read_manifest(str(folder))
    record, data = manifest.shards[shard], encode_index(index)
    (folder / record.index_file).write_bytes(data)
    tar = (folder / record.file).read_bytes()
    told = {"num_bytes": len(tar), "sha256": sha256(tar).hexdigest()}
    told |= {"index_num_bytes": len(data), "index_sha256": sha256(data).hexdigest()}
    shards = [*manifest.shards[:shard], replace(record, **told), *manifest.shards[shard + 1 :]]
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, shards=tuple(shards))))


def store_tokenizer(folder: Path, side: str, tokenizer: Tokenizer) -> TokenizerRecord:
    """Write a tokenizer's copy into a dataset and return the manifest's record of it."""
    file = f"tokenizers/{side}/{tokenizer.file_name}"
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(tokenizer.file_bytes)
    record = describe_tokenizer(tokenizer, f"tokenizers/{side}")
    return replace(record, source=f"tests/{side}", convention=None)


@lru_cache
def byte_level(vocab_size: int) -> Tokenizer:
    """Return a lossless byte-level BPE, trained on the sentences above."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _train(tokenizer, trainer)


@lru_cache
def word_pieces(vocab_size: int = 300) -> Tokenizer:
    """Return a WordPiece that covers no white space: its tokens do not tile a text."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=["[UNK]"], show_progress=False
    )
    return _train(tokenizer, trainer)


def with_control_tokens(tokenizer: Tokenizer, *names: str, special: bool = True) -> Tokenizer:
    """Return a tokenizer with more control tokens, or words, behind those that it has."""
    more = tokenizers.Tokenizer.from_str(tokenizer.file_bytes.decode())
    more.add_tokens([tokenizers.AddedToken(n, special=special, normalized=False) for n in names])
    return _saved(more)


def _train(tokenizer: tokenizers.Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return _saved(tokenizer)


def _saved(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    with TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        tokenizer.save(str(path))
        return load_tokenizer(str(path))


def _write_shard(
    path: Path,
    documents: Sequence[SourceDocument],
    student: Tokenizer,
    teacher: Tokenizer,
    keep_text: bool,
    metadata: Sequence[MetadataColumn],
) -> WrittenShard:
    with path.open("wb") as file:
        writer = ShardWriter(file, keep_text=keep_text, metadata=metadata)
        writer.add(align_batch(documents, student, teacher))
        return writer.close()


def _write_dead_letters(folder: Path, letters: Sequence[tuple[str, str]]) -> DeadLetterRecord:
    reasons = [reason for _, reason in letters]
    lines = [f'{{"document_id": "{i}", "reason": "{reason}"}}\n' for i, reason in letters]
    data = "".join(lines).encode()
    (folder / DEAD_LETTERS_FILE).write_bytes(data)
    return DeadLetterRecord(
        file=DEAD_LETTERS_FILE,
        sha256=sha256(data).hexdigest(),
        count=len(letters),
        by_reason={reason: reasons.count(reason) for reason in sorted(set(reasons))},
    )
