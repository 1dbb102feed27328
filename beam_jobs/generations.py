"""A dataset's generations: keep the old manifest, then publish the next."""

from beam_jobs import storage
from beam_jobs.job_errors import OptionsError
from pipeline.command_line.failures import hinted
from pipeline.dataset.dataset_reading import nearest_dataset
from schemas.errors import DatasetError
from schemas.manifest import (
    MANIFEST_FILE,
    Manifest,
    decode_manifest,
    encode_manifest,
    kept_manifest_file,
)


def read_newest(output: str) -> Manifest:
    """Read a dataset's manifest; OptionsError if missing, DatasetError if damaged."""
    path = storage.join(output, MANIFEST_FILE)
    if storage.num_bytes_of(path) is None:
        error = OptionsError(
            f"{output} holds no {MANIFEST_FILE}: it isn't a dataset, or its align job has not "
            "finished; run that command again"
        )
        raise hinted(error, nearest_dataset(output))
    return decode_manifest(storage.read_bytes(path), at=path)


def keep_manifest(output: str, manifest: Manifest, *, scratch: str) -> None:
    """Copy the newest manifest, byte for byte, to its generation's name."""
    kept = _path_of_kept(output, manifest.generation)
    storage.make_folder(kept.rpartition("/")[0])
    data = storage.read_bytes(storage.join(output, MANIFEST_FILE))
    storage.write_atomically(kept, data, scratch=scratch)


def read_kept(output: str, generation: int) -> Manifest:
    """Read a manifest kept by `keep_manifest`; DatasetError if missing or damaged."""
    path = _path_of_kept(output, generation)
    try:
        return decode_manifest(storage.read_bytes(path), at=path)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} does not exist: restore the file") from error


def _path_of_kept(output: str, generation: int) -> str:
    return storage.join(output, *kept_manifest_file(generation).split("/"))


def publish_manifest(output: str, manifest: Manifest, *, scratch: str) -> None:
    """Replace the newest manifest."""
    path = storage.join(output, MANIFEST_FILE)
    storage.write_atomically(path, encode_manifest(manifest), scratch=scratch)
