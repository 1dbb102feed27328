"""One output folder, one configuration: refuse, resume or start."""

import glob
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

from apache_beam.io.filesystems import FileSystems

from beam_jobs import storage
from beam_jobs.generations import read_kept
from beam_jobs.job_errors import OptionsError
from pipeline.command_line.failures import hinted
from pipeline.command_line.git_lfs import POINTER_BYTES
from pipeline.command_line.pasted import pasted
from schemas.manifest import MANIFEST_FILE, Manifest, decode_manifest
from schemas.records import RecordError, read_record

BLOCKS_PREFIX = "blocks-"
"""Of files in which blocks wait."""

UNUSABLE_PREFIX, LINES_PREFIX = "unusable-", "lines-"
"""Of notes that parts of the input leave."""

SUMMARY_FILE = "summary.json"
CONFIGURATION_FILE = "configuration.json"

APPEND_TO = "append_to"
"""In a configuration: what is `added_to`."""

RUN_PREFIX = ".vocag-"
_OF_ATTEMPT = (BLOCKS_PREFIX, UNUSABLE_PREFIX, LINES_PREFIX)

Describe = Callable[[Mapping[str, Any], Mapping[str, Any]], str]
"""Describes how their configuration differs from ours."""


def run_folder_of(output: str, configuration: Mapping[str, Any]) -> str:
    """Folder of a configuration's temporary files.

    Example:
        >>> run_folder_of("aligned", {"name": "corpus"})
        'aligned/.vocag-f49c293b139871fd'
    """
    canonical = json.dumps(configuration, sort_keys=True).encode()
    return storage.join(output, f"{RUN_PREFIX}{sha256(canonical).hexdigest()[:16]}")


def find_finished(
    output: str, configuration: Mapping[str, Any], describe: Describe | None = None
) -> Manifest | None:
    """The dataset in `output` if this configuration made it, as it was before it grew.

    OptionsError if another dataset or run is there, or files are lost.
    """
    path = storage.join(output, MANIFEST_FILE)
    if storage.num_bytes_of(path) is not None:
        made = manifest = decode_manifest(storage.read_bytes(path), at=path)
        if manifest.generation and manifest.configuration != configuration:
            made = read_kept(output, 0)
        if made.configuration != configuration:
            difference = (describe or describe_differences)(made.configuration, configuration)
            told = f"a dataset with a different configuration: {difference}"
            raise _refusal(output, told, others="add to it by --append, ")
        require_all_files(output, manifest)
        return made
    runs = _find_runs(output)
    for run in runs:
        theirs = read_left_file(run)
        if theirs != configuration:
            difference = (describe or describe_differences)(theirs, configuration)
            raise _refusal(output, f"an unfinished run, configured differently: {difference}")
    if not runs:
        _require_no_shards(output, str(configuration["name"]))
    return None


def require_all_files(output: str, manifest: Manifest) -> None:
    """Raise OptionsError if a dataset's file is missing or cut."""
    sizes = {shard.file: shard.num_bytes for shard in manifest.shards}
    sizes |= {shard.index_file: shard.index_num_bytes for shard in manifest.shards}
    found = storage.list_folder(output)
    lost = [name for name, num_bytes in sizes.items() if found.get(name) != num_bytes]
    others = (manifest.dead_letters.file, manifest.student.file, manifest.teacher.file)
    paths = {name: storage.join(output, *name.split("/")) for name in others}
    lost += [name for name, path in paths.items() if storage.num_bytes_of(path) is None]
    if lost:
        if 0 < found.get(lost[0], 0) < POINTER_BYTES:
            storage.read_bytes(storage.join(output, lost[0]))  # refuses a Git LFS pointer
        raise OptionsError(
            f"{len(lost)} files of {output} are gone or cut, such as {lost[0]}: restore them, or "
            "delete that folder to make the dataset again"
        )


def start_run(folder: str, configuration: Mapping[str, Any]) -> None:
    """Create a run's folder; remove an earlier attempt's blocks and notes, which it makes anew."""
    storage.make_folder(folder)
    body = (json.dumps(configuration, indent=1, sort_keys=True) + "\n").encode()
    storage.write_atomically(storage.join(folder, CONFIGURATION_FILE), body, scratch=folder)
    left = [name for name in storage.list_folder(folder) if name.startswith(_OF_ATTEMPT)]
    storage.delete_files(folder, left)  # blocks are texts, as large as the corpus


def close_run(output: str, folder: str, manifest: Manifest) -> None:
    """Remove a run's folder, abandoned shards, and runs that began to add to an earlier state.

    The summary goes last: while it exists, the same command continues here.
    """
    named = {name for shard in manifest.shards for name in (shard.file, shard.index_file)}
    pattern = _shard_pattern(manifest.name, any_generation=manifest.generation > 0)
    found = storage.list_folder(output)
    abandoned = [name for name in found if pattern.fullmatch(name) and name not in named]
    storage.delete_files(output, abandoned)
    current = None, added_to(manifest)
    for path in _find_runs(output):
        run = path.removesuffix(f"/{CONFIGURATION_FILE}")
        with suppress(OptionsError):  # damaged: what it was isn't known
            if run != folder and read_left_file(path).get(APPEND_TO) not in current:
                storage.remove_folder(run)
    left = storage.list_folder(folder)
    storage.delete_files(folder, [name for name in left if name != SUMMARY_FILE])
    storage.remove_folder(folder)


def added_to(manifest: Manifest) -> str:
    """Return a dataset's fingerprint without removals: shards stay when documents leave."""
    return replace(manifest, removed=None).fingerprint


def read_commit[Record](path: str, kind: type[Record]) -> Record | None:
    """An earlier attempt's commit record; None if missing or unreadable."""
    if storage.num_bytes_of(path) is None:
        return None
    try:
        return read_record(storage.read_bytes(path), kind)
    except RecordError:
        return None


def read_left_file(path: str) -> dict[str, Any]:
    """Read a JSON object from a run's folder; OptionsError if damaged."""
    try:
        found: dict[str, Any] = json.loads(storage.read_bytes(path))
    except ValueError as error:
        folder = path.rpartition("/")[0]
        raise OptionsError(
            f"{path} is damaged ({error}): delete the folder {folder}, which holds what an "
            "interrupted run left, and run the same command again"
        ) from error
    return found


def require_shared(folder: str) -> None:
    """Raise OptionsError on a worker without the run's folder."""
    if storage.is_local(folder) and not os.path.isfile(storage.join(folder, CONFIGURATION_FILE)):
        raise OptionsError(
            f"worker {socket.gethostname()} does not see {folder}, where this job's files are: "
            "the output must be a folder that every worker mounts under the same path, or lie in "
            "an object store"
        )


def _find_runs(output: str) -> list[str]:
    pattern = storage.join(glob.escape(output), f"{RUN_PREFIX}*", CONFIGURATION_FILE)
    if storage.is_local(output):
        return sorted(glob.glob(pattern))
    return sorted(found.path for found in FileSystems.match([pattern])[0].metadata_list)


def _refusal(output: str, what: str, others: str = "") -> OptionsError:
    error = OptionsError(
        f"--output {output} holds {what}; {others}choose another --output, or move that folder "
        "away to start anew"
    )
    if not storage.is_local(output):
        return hinted(error, f"--output {pasted(output.rstrip('/') + '-2')}")
    move = f"mv {pasted(output)} {pasted(output + '.old')}"
    return hinted(error, f"{move}  # then run the same command again")


def describe_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Name differing values, "" if none."""
    return "; ".join(
        f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    )


def _require_no_shards(output: str, name: str) -> None:
    pattern = _shard_pattern(name)
    found = sorted(file for file in storage.list_folder(output) if pattern.fullmatch(file))
    if found:
        raise _refusal(
            output,
            f"{len(found)} files such as {found[0]} but no manifest that says what made them",
        )


def _shard_pattern(name: str, *, any_generation: bool = False) -> re.Pattern[str]:
    generation = r"(g\d{3,}-)?" if any_generation else ""
    return re.compile(rf"{re.escape(name)}-{generation}\d{{6}}-of-\d{{6}}\.(tar|index\.parquet)")
