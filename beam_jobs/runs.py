"""One output folder, one configuration: refuse, resume or start."""

import glob
import json
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from apache_beam.io.filesystems import FileSystems

from beam_jobs import storage
from beam_jobs.blocks import BLOCKS_PREFIX
from beam_jobs.options import OptionsError
from beam_jobs.sharding import CONFIGURATION_FILE
from schemas.manifest import MANIFEST_FILE, Manifest, decode_manifest

_RUN_PREFIX = ".vocag-"


def run_folder_of(output: str, configuration: Mapping[str, Any]) -> str:
    """Return where a configuration keeps its temporary files.

    Example:
        >>> run_folder_of("aligned", {"name": "corpus"})
        'aligned/.vocag-1d1f6a07e2a4b2fc'
    """
    canonical = json.dumps(configuration, sort_keys=True).encode()
    return storage.join(output, f"{_RUN_PREFIX}{sha256(canonical).hexdigest()[:16]}")


def find_finished(output: str, configuration: Mapping[str, Any]) -> Manifest | None:
    """Return the dataset in `output` where the same configuration has already made it.

    Raises:
        OptionsError: the folder holds a dataset, or a run, of another configuration.
    """
    path = storage.join(output, MANIFEST_FILE)
    if storage.num_bytes_of(path) is not None:
        manifest = decode_manifest(storage.read_bytes(path), where=path)
        _require_same(output, "a dataset", manifest.configuration, configuration)
        return manifest
    runs = _find_runs(output)
    for run in runs:
        _require_same(
            output, "an unfinished run", json.loads(storage.read_bytes(run)), configuration
        )
    if not runs:
        _require_no_shards(output, str(configuration["name"]))
    return None


def open_run(folder: str, configuration: Mapping[str, Any]) -> None:
    """Create a run's folder, and remove what an earlier attempt has left there to no use."""
    storage.make_folder(folder)
    body = (json.dumps(configuration, indent=1, sort_keys=True) + "\n").encode()
    storage.write_atomically(storage.join(folder, CONFIGURATION_FILE), body, scratch=folder)
    if storage.is_local(folder):
        left = [name for name in storage.list_folder(folder) if name.startswith(BLOCKS_PREFIX)]
        storage.delete_files(folder, left)  # texts, as large as the corpus


def _find_runs(output: str) -> list[str]:
    pattern = storage.join(glob.escape(output), f"{_RUN_PREFIX}*", CONFIGURATION_FILE)
    if storage.is_local(output):
        return sorted(glob.glob(pattern))
    pattern = storage.join(output, f"{_RUN_PREFIX}*", CONFIGURATION_FILE)
    return sorted(found.path for found in FileSystems.match([pattern])[0].metadata_list)


def _require_same(
    output: str, what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    if theirs == ours:
        return
    differences = [
        f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    raise OptionsError(
        f"--output {output} holds {what} of another configuration: {'; '.join(differences)}; "
        "choose another --output, or delete that folder"
    )


def _require_no_shards(output: str, name: str) -> None:
    shards = re.compile(rf"{re.escape(name)}-\d{{6}}-of-\d{{6}}\.(tar|index\.parquet)")
    found = sorted(file for file in storage.list_folder(output) if shards.fullmatch(file))
    if found:
        raise OptionsError(
            f"--output {output} holds {len(found)} files such as {found[0]} but no manifest that "
            "says what made them; choose another --output, or delete them"
        )
