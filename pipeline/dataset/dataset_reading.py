"""Read a dataset's manifest and samples, checked before use."""

import os
import zlib
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

import fsspec

from pipeline.command_line.failures import hinted
from pipeline.command_line.git_lfs import POINTER_BYTES, refuse_pointer
from pipeline.command_line.pasted import pasted
from pipeline.remote.first_contact import require_answer
from schemas.errors import RESTORE, DamagedSampleError, DamagedShardError, DatasetError
from schemas.index import ShardIndex
from schemas.manifest import MANIFEST_FILE, Manifest, decode_manifest


def read_manifest(dataset: str) -> Manifest:
    """Read a dataset's manifest, from anywhere that `fsspec` opens.

    DatasetError if it is missing or incomplete; NoAnswerError if the store is silent.
    """
    path, data = read_manifest_bytes(dataset)
    return decode_manifest(data, at=path)


def read_manifest_bytes(dataset: str) -> tuple[str, bytes]:
    """Return a manifest's path and bytes; see `read_manifest`."""
    path = f"{folder_of(dataset)}/{MANIFEST_FILE}"
    require_answer(path)
    try:
        return path, read_whole(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if "::" in path and os.path.exists(path):
            raise DatasetError(
                f"{dataset}: readers take :: for a chain of URLs: rename that folder"
            ) from error
        told = (
            f"{path} does not exist: {dataset} isn't a dataset, or its align job has not finished; "
            "name a finished output folder, or run the job again to resume it"
        )
        if isinstance(error, NotADirectoryError):
            told = f"{dataset} is a file, not a dataset: name the folder that holds its "
            told += MANIFEST_FILE
        raise hinted(DatasetError(told), nearest_dataset(dataset)) from error


def folder_of(dataset: str) -> str:
    """Return the folder of a dataset, named by that or its manifest.

    Example:
        >>> folder_of("gs://bucket/aligned.json/manifest.json")
        'gs://bucket/aligned.json'
    """
    folder, _, name = dataset.rpartition("/")
    names_manifest = name == MANIFEST_FILE and not os.path.isdir(dataset)
    return folder or "." if names_manifest else dataset.rstrip("/")


def nearest_dataset(missing: str) -> str:
    """Suggest a dataset near a missing one, or the help, for pasting."""
    folder = Path(missing)
    if (folder.parent / MANIFEST_FILE).is_file():
        return f"{pasted(str(folder.parent))}  # a dataset"
    for place in (folder, folder.parent, Path()):
        found = sorted(place.glob(f"*/{MANIFEST_FILE}")) if place.is_dir() else []
        names = {path.parent.name: str(path.parent) for path in found}
        if names:
            closest = get_close_matches(folder.name, names, n=1, cutoff=0)
            return f"{pasted(names[closest[0]])}  # a dataset"
    return "vocag align --help"


def read_whole(url: str) -> bytes:
    """Read a small file in one request: a store might replace it between two.

    FileNotFoundError, or PointerError for a Git LFS pointer.
    """
    filesystem, path = fsspec.core.url_to_fs(url)
    data: bytes = filesystem.cat_file(path)
    refuse_pointer(url, data)
    return data


def num_bytes_of(url: str) -> int | None:
    """Return a file's size, None if the server hides it."""
    filesystem, path = fsspec.core.url_to_fs(url)
    num_bytes: int | None = filesystem.size(path)
    if num_bytes is not None and num_bytes < POINTER_BYTES:
        read_whole(url)
    return num_bytes


def read_generation(location: str, newest: Manifest, number: int) -> Manifest:
    """Read a generation's manifest; DatasetError if it is missing or altered."""
    if number == newest.generation:
        return newest
    record = next((entry for entry in newest.generations if entry.number == number), None)
    if record is None:
        raise DatasetError(
            f"{location} has no generation {number}: its generations are 0 … {newest.generation}"
        )
    path = f"{location}/{record.file}"
    try:
        manifest = decode_manifest(read_whole(path), at=path)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} does not exist: restore the file") from error
    if manifest.fingerprint != record.fingerprint:
        raise DatasetError(
            f"{path} has fingerprint {manifest.fingerprint[:16]}…, generation "
            f"{number} had {record.fingerprint[:16]}…: restore the file"
        )
    return manifest


def find_generation(manifest: Manifest, fingerprint: str) -> int | None:
    """Return the number of the generation with a fingerprint."""
    return {own: number for number, own in manifest.fingerprints.items()}.get(fingerprint)


def read_sample(file: BinaryIO, index: ShardIndex, place: int, *, shard: str) -> memoryview:
    """Read a sample's payload.

    DamagedShardError if the tar is cut, DamagedSampleError if the CRC-32 differs.
    """
    start, size = int(index.payload_offset[place]), int(index.payload_bytes[place])
    file.seek(start)
    payload = file.read(size)
    if len(payload) != size:
        raise DamagedShardError(
            f"shard {shard} ends inside sample {index.key[place]} (byte {start + size} is "
            f"missing): it is cut; {RESTORE}"
        )
    found, expected = zlib.crc32(payload), int(index.crc32[place])
    if found != expected:
        raise DamagedSampleError(
            f"sample {index.key[place]} in shard {shard} has CRC-32 {found:08x}, its index says "
            f"{expected:08x}: the payload was altered; {RESTORE}"
        )
    return memoryview(payload)
