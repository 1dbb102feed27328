"""A finished dataset as input.

The launcher chooses documents once: conditions need DuckDB, which workers lack.
"""

import os
import zlib
from base64 import b85decode, b85encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, BinaryIO

import numpy as np

from beam_jobs import storage
from beam_jobs.align.inputs.documents import DeadLetter, Outcome, ReadingRules, Reason
from beam_jobs.align.inputs.input_identity import InputChangedError
from beam_jobs.align.inputs.parts import DATASET, SAMPLE_BYTES_PER_TEXT_BYTE, InputFile, InputPart
from beam_jobs.align.inputs.placing import place_text
from beam_jobs.generations import read_kept, read_newest
from beam_jobs.job_errors import InputError
from beam_jobs.resuming import require_all_files
from beam_jobs.tokenizer_files import StoredTokenizer, load_stored
from pipeline.dataset.chosen_documents import Kept, require_documents, select_documents
from pipeline.dataset.dataset_reading import find_generation, folder_of, read_sample
from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import find_text
from pipeline.tokenization.pretokenizer_splits import library_versions
from schemas.document import decode_document
from schemas.errors import DatasetError
from schemas.index import ShardIndex
from schemas.manifest import FORMAT, MANIFEST_FILE, TokenizerRecord

_MIXTURE = ".toml"
_OPENED = 4


@dataclass(frozen=True)
class StoredDataset(Dataset):
    """A dataset read through `storage`."""

    def open_file(self, name: str) -> BinaryIO:
        """Open a file as stored."""
        return storage.open_to_read(self.path_of(name))

    def read_file(self, name: str) -> bytes:
        """Read a small file."""
        return storage.read_bytes(self.path_of(name))

    def path_of(self, name: str) -> str:
        """Path of one of its files."""
        return storage.join(self.location, *name.split("/"))

    def stored_tokenizer(self, record: TokenizerRecord) -> StoredTokenizer:
        """Locate a tokenizer for spelling only."""
        path, versions = self.path_of(record.file), library_versions()
        return StoredTokenizer(path, record.sha256, record.special_strings, False, versions)


@dataclass(frozen=True)
class InputDataset:
    """A dataset's newest generation, and the shards to read.

    `scores` is the digest of losses that `where` uses.
    """

    dataset: StoredDataset
    where: str
    scores: str
    files: tuple[InputFile, ...]
    num_documents: int

    @property
    def keeps_text(self) -> bool:
        """Whether samples hold their texts."""
        return bool(self.dataset.manifest.configuration.get("keep_text"))

    @property
    def identity(self) -> dict[str, Any]:
        """Configuration entries for the dataset and its choice."""
        manifest = self.dataset.manifest
        return {
            "input_dataset": manifest.fingerprint,
            "input_generation": manifest.generation,
            "input_where": self.where,
            **({"input_scores": self.scores} if self.scores else {}),
        }

    @property
    def assumed_text_bytes(self) -> int:
        """Bytes of text that give as many buckets as the documents' own files.

        If these sizes are unknown, or the dataset has grown, its texts count.
        """
        manifest = self.dataset.manifest
        text_bytes, total = sum(f.num_bytes for f in self.files), manifest.totals["num_text_bytes"]
        made, taken_for = manifest.configuration, total
        if "num_buckets" in made and manifest.newest_shards == manifest.shards:
            factor = SAMPLE_BYTES_PER_TEXT_BYTE + self.keeps_text
            most, least = (
                count * made["shard_bytes"] // factor
                for count in (made["num_buckets"], made["num_buckets"] - 1)
            )
            listed = made.get("input_bytes", total)
            taken_for = listed if least < listed <= most else total
            taken_for = min(max(taken_for, least + 1), most)
        return taken_for * text_bytes // total


def find_dataset(patterns: Sequence[str], format: str | None) -> str | None:
    """The folder of the dataset that the input names, None for files.

    InputError for a mixture, a missing dataset, or one among other input.
    """
    for pattern in patterns:
        if pattern.endswith(_MIXTURE) and not os.path.isdir(pattern):
            raise InputError(f"--input {pattern} is a mixture: align its datasets one by one")
    found = [folder for folder in map(_dataset_folder, patterns) if folder is not None]
    if not found and format == DATASET:
        raise InputError(
            f"--format {DATASET}: {patterns[0]} holds no {MANIFEST_FILE} of a dataset: name a "
            "finished dataset's folder"
        )
    if not found:
        return None
    if len(patterns) > 1:
        raise InputError(
            f"--input {found[0]} is a dataset, which is read alone: align one dataset, and add "
            "other input by --append"
        )
    if format not in (None, DATASET):
        raise InputError(f"--format {format}: --input {found[0]} is a dataset; leave it out")
    return found[0]


def open_dataset_as_input(location: str, where: str) -> InputDataset:
    """Open a dataset's newest generation; choose its documents.

    WhereError for an invalid or unmatched condition; OptionsError for missing files, InputError for
    no documents.
    """
    dataset = StoredDataset(location, read_newest(location))
    manifest = dataset.manifest
    require_all_files(location, manifest)
    selection = select_documents(dataset, where)
    numbers = [(record.num_documents, record.num_text_bytes, "") for record in manifest.shards]
    if not selection.is_whole:
        numbers = list(selection.each(_count_chosen))
    files = [
        InputFile(
            path=dataset.path_of(record.file),
            source=record.file,
            num_bytes=num_bytes,
            format=DATASET,
            compression="none",
            content=f"dataset:{manifest.fingerprint}",
            num_documents=record.num_documents,
            chosen=chosen,
        )
        for record, (count, num_bytes, chosen) in zip(manifest.shards, numbers, strict=True)
        if count
    ]
    num_documents = sum(count for count, _, _ in numbers)
    require_documents(num_documents, selection)
    if not num_documents:
        raise InputError(f"--input {location} is a dataset without documents")
    digest = selection.scores_digest
    return InputDataset(dataset, selection.where, digest, tuple(files), num_documents)


def read_texts(part: InputPart, rules: ReadingRules) -> Iterator[Outcome]:
    """Yield a part's documents in shard order.

    InputChangedError if the dataset was made anew since the plan, DatasetError if the shard or its
    index differs from the manifest.
    """
    source = part.file.source
    location = part.file.path.removesuffix(source).rstrip("/")
    dataset = _open(location, part.file.content.partition(":")[2])
    manifest = dataset.manifest
    number = [record.file for record in manifest.shards].index(source)
    index = dataset.read_index(number, with_names=True)
    names = [field.name for field in rules.metadata if field.name in index.metadata]
    columns = {name: index.metadata[name].to_pylist() for name in names}
    sides = {"student": manifest.student, "teacher": manifest.teacher}
    load = {
        side: partial(load_stored, dataset.stored_tokenizer(record))
        for side, record in sides.items()
    }
    with dataset.open_shard(number) as shard:
        for place in _chosen_places(part, len(index)):
            name = index.document_id[place]
            try:
                document = decode_document(read_sample(shard, index, place, shard=source))
            except DatasetError as error:
                yield DeadLetter(source, place, name, Reason.UNREADABLE_INPUT, str(error))
                continue
            text = find_text(document, load)
            if text is None:
                yield DeadLetter(source, place, name, Reason.TEXT_LOST, _LOST)
                continue
            values = {field: column[place] for field, column in columns.items()}
            yield place_text(text, values, rules, source=source, position=place, document_id=name)


_LOST = (
    "the dataset keeps no text of it, and neither the student's nor the teacher's tokens spell it "
    "(SHA-256 compared)"
)


def _dataset_folder(pattern: str) -> str | None:
    folder = folder_of(storage.absolute(pattern))
    path = storage.join(folder, MANIFEST_FILE)
    if storage.num_bytes_of(path) is None:  # not a pattern: a folder may be called "data [1]"
        return None
    return folder if FORMAT.name.encode() in storage.read_bytes(path) else None


def _count_chosen(index: ShardIndex, kept: Kept) -> tuple[int, int, str]:
    if kept is None:
        return len(index), int(index.num_text_bytes.sum()), ""
    chosen = b85encode(zlib.compress(np.packbits(kept).tobytes())).decode()
    return int(kept.sum()), int(index.num_text_bytes[kept].sum()), chosen


def _chosen_places(part: InputPart, num_documents: int) -> Sequence[int]:
    places = range(num_documents)[part.start : part.end]
    if not part.file.chosen:
        return places
    bits = np.frombuffer(zlib.decompress(b85decode(part.file.chosen)), np.uint8)
    kept = np.unpackbits(bits, count=num_documents)
    return [place for place in places if kept[place]]


@lru_cache(_OPENED)
def _open(location: str, fingerprint: str) -> StoredDataset:
    """Open the generation that the job was planned with."""
    manifest = read_newest(location)
    number = find_generation(manifest, fingerprint)
    if number is not None and number != manifest.generation:
        manifest = read_kept(location, number)
    if manifest.fingerprint != fingerprint:
        raise InputChangedError(
            f"{location} isn't the dataset for which the job was planned ({fingerprint[:16]}…): "
            "run the same command again"
        )
    return StoredDataset(location, manifest)
