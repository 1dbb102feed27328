"""A finished dataset as input: which of its documents are read, and their texts.

Its files are read as all input is, so a worker needs nothing but the storage they lie in. Which
documents are read is decided once, by the launcher: conditions need DuckDB, which workers lack.
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
from beam_jobs.align.inputs.records import place_text
from beam_jobs.errors import InputError
from beam_jobs.generations import read_kept, read_newest
from beam_jobs.runs import require_all_files
from beam_jobs.tokenizer_files import StoredTokenizer, load_stored
from pipeline.dataset.files import Dataset
from pipeline.dataset.reading import find_generation, folder_of, read_sample
from pipeline.dataset.selection import Kept, require_documents, select_documents
from pipeline.dataset.tokenizers import find_text
from pipeline.tokenization.splits import library_versions
from schemas.document import decode_document
from schemas.errors import DatasetError
from schemas.index import ShardIndex
from schemas.manifest import FORMAT, MANIFEST_FILE, TokenizerRecord

_MIXTURE = ".toml"
_OPENED = 4


@dataclass(frozen=True)
class StoredDataset(Dataset):
    """A dataset whose files are read as a job reads its input."""

    def open_file(self, name: str) -> BinaryIO:
        """Open one of its files as it is stored."""
        return storage.open_to_read(self.path_of(name))

    def read_file(self, name: str) -> bytes:
        """Return the whole of a small one."""
        return storage.read_bytes(self.path_of(name))

    def path_of(self, name: str) -> str:
        """Return where one of its files lies."""
        return storage.join(self.location, *name.split("/"))

    def stored_tokenizer(self, record: TokenizerRecord) -> StoredTokenizer:
        """Return where one of its tokenizers is, to spell texts with: nothing is encoded."""
        path, versions = self.path_of(record.file), library_versions()
        return StoredTokenizer(path, record.sha256, record.special_strings, False, versions)


@dataclass(frozen=True)
class InputDataset:
    """A dataset that is read as input: its newest generation, and shards of which any are read.

    Without a condition all documents are that are not removed. `scores` is the digest of the losses
    that it chooses by.
    """

    dataset: StoredDataset
    where: str
    scores: str
    files: tuple[InputFile, ...]
    num_documents: int

    @property
    def keeps_text(self) -> bool:
        """Whether each sample holds its text."""
        return bool(self.dataset.manifest.configuration.get("keep_text"))

    @property
    def identity(self) -> dict[str, Any]:
        """What names the input: the dataset as it is now, and what is chosen of it."""
        manifest = self.dataset.manifest
        return {
            "input_dataset": manifest.fingerprint,
            "input_generation": manifest.generation,
            "input_where": self.where,
            **({"input_scores": self.scores} if self.scores else {}),
        }

    @property
    def assumed_text_bytes(self) -> int:
        """How much text its documents are taken for, which says into how many buckets they go.

        They are as many as the same documents' own files would be hashed into, as far as the
        dataset records the size of these; of one that has grown only the texts are counted.
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
    """Return the folder of the dataset that the input names, None if it names files.

    InputError for a mixture, a dataset among other input, or none when one is asked for.
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
    """Return the newest generation of a dataset, and which of its documents are read.

    WhereError if that is no condition or none matches; OptionsError if the dataset has lost files.
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
    """Yield a part's documents in the order of their shard.

    InputChangedError if the dataset was made anew since the job was planned, DatasetError if the
    shard or its index is not the manifest's.
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
    if storage.num_bytes_of(path) is None:  # by its very name: a folder may be called "data [1]"
        return None
    return folder if FORMAT.name.encode() in storage.read_bytes(path) else None


def _count_chosen(index: ShardIndex, kept: Kept) -> tuple[int, int, str]:
    """Return how many documents of a shard are read, their bytes of text, and which they are."""
    if kept is None:
        return len(index), int(index.num_text_bytes.sum()), ""
    chosen = b85encode(zlib.compress(np.packbits(kept).tobytes())).decode()
    return int(kept.sum()), int(index.num_text_bytes[kept].sum()), chosen


def _chosen_places(part: InputPart, num_documents: int) -> Sequence[int]:
    """Return the places in a shard's index of a part's documents, ascending."""
    places = range(num_documents)[part.start : part.end]
    if not part.file.chosen:
        return places
    bits = np.frombuffer(zlib.decompress(b85decode(part.file.chosen)), np.uint8)
    kept = np.unpackbits(bits, count=num_documents)
    return [place for place in places if kept[place]]


@lru_cache(_OPENED)
def _open(location: str, fingerprint: str) -> StoredDataset:
    """Return the generation of a dataset that a job was planned with; it may grow meanwhile."""
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
