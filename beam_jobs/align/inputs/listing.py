"""Files that a pattern names; none is skipped silently."""

import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from beam_jobs import storage
from beam_jobs.align.inputs.formats import format_of_suffix
from beam_jobs.job_errors import InputError
from pipeline.command_line.failures import hinted
from pipeline.command_line.nearest import look_near
from pipeline.command_line.pasted import pasted

WILDCARD = re.compile(r"[*?\[]")
"""Makes a path a glob."""

_LOOKED_AT = 1024
"""Bytes of a file of unknown kind, to see whether it is text."""

_DATASET_STATE = "state.json"
_DATASET_SPLITS = "dataset_dict.json"

logger = logging.getLogger(__name__)

_COMPRESSIONS = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}


class FoundFile(NamedTuple):
    """A file, its bytes, and time of writing in nanoseconds (0 in a store)."""

    path: str
    num_bytes: int
    modified: int


class _Splits(msgspec.Struct):
    splits: list[str]


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct, rename=lambda name: f"_{name}"):
    data_files: list[_DataFile]
    indices_files: list[Any] | None = None
    indices_data_files: list[Any] | None = None


def list_files(pattern: str) -> Iterator[FoundFile]:
    """Yield the files that a path or glob names.

    A folder by `datasets.save_to_disk` means its Arrow files. InputError if nothing matches, or a
    match isn't a readable file.
    """
    if not storage.is_local(pattern):
        yield from _match_remote(pattern)
        return
    if os.path.isdir(pattern):
        yield from _files_of_folder(pattern)
        return
    is_plain = os.path.lexists(pattern) or not WILDCARD.search(pattern)
    paths = [pattern] if is_plain else _visible(sorted(_walk(pattern)), pattern)
    if not any(map(os.path.lexists, paths)):
        raise _no_file(pattern)
    for path in paths:
        why = _why_not_a_file(path)
        if why:
            raise InputError(f"{path} is {why}: remove it, fix it, or narrow --input")
    for path in paths:
        status = os.stat(path)
        yield FoundFile(path, status.st_size, status.st_mtime_ns)


def _no_file(pattern: str) -> InputError:
    error = InputError(f"--input {pattern} matches no file; quote globs and check the folder")
    if storage.is_local(pattern):
        return hinted(
            error, look_near(fixed_folder(pattern) if WILDCARD.search(pattern) else pattern)
        )
    return error


def fixed_folder(pattern: str) -> str:
    """Part of a pattern that sources are relative to, with its slash.

    Example:
        >>> fixed_folder("/data/web/**.jsonl")
        '/data/web/'
    """
    is_plain = storage.is_local(pattern) and os.path.isfile(pattern)
    if storage.is_local(pattern) and os.path.isdir(pattern):
        return pattern.rstrip("/") + "/"
    wildcard = None if is_plain else WILDCARD.search(pattern)
    fixed = pattern[: wildcard.start()] if wildcard else pattern
    return fixed[: fixed.rfind("/") + 1]


def _match_remote(pattern: str) -> Iterator[FoundFile]:
    from apache_beam.io.filesystems import BeamIOError, FileSystems

    try:
        listed = FileSystems.match([pattern.replace("/**/", "/**")])[0].metadata_list
    except (BeamIOError, ValueError) as error:
        raise InputError(f"--input {pattern} can't be listed: {error}") from error
    matches = _matcher(pattern)
    found = {e.path: e for e in listed if e.path == pattern or matches(e.path)}
    paths = _visible(list(found), pattern)
    if not paths:
        raise _no_file(pattern)
    for path in paths:
        yield FoundFile(path, found[path].size_in_bytes, 0)


def _matcher(pattern: str) -> Callable[[str], object]:
    """Matcher of Beam's patterns, except that `**/` may match no folder."""
    from apache_beam.io.filesystem import FileSystem

    # Beam's `*` ends at a backslash, which a local name may hold.
    translated = FileSystem.translate_pattern(pattern).replace(r"[^/\\]*", "[^/]*")
    return re.compile(translated.replace("/.*/", "/(?:.*/)?")).match


def _visible(paths: Sequence[str], pattern: str) -> Sequence[str]:
    """Drop hidden paths, which `**` doesn't match, as in shells."""
    start = max(0, len(fixed_folder(pattern)) - 1)
    if "**" not in pattern or "/." in pattern[start:]:
        return paths
    hidden = [path for path in paths if "/." in path[start:]]
    if hidden:
        logger.warning(
            "--input %s leaves out %d hidden files, such as %s: ** means them only if the pattern "
            "names the dot, as in **/.*",
            *(pattern, len(hidden), hidden[0]),
        )
    return [path for path in paths if "/." not in path[start:]]


def _walk(pattern: str) -> Iterator[str]:
    """Yield matches that aren't folders; links are followed once.

    Beam's listing drops dangling ones.
    """
    matches = _matcher(pattern)
    root = fixed_folder(pattern)
    max_slashes = sys.maxsize if "**" in pattern else pattern.count("/")
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_raise_unlisted):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        goes_deeper = folder.rstrip("/").count("/") + 1 < max_slashes
        folders[:] = sorted(folders) if goes_deeper else []
        yield from filter(matches, (os.path.join(folder, name) for name in names))


def _raise_unlisted(error: OSError) -> None:
    failure = InputError(f"--input: {error.filename} can't be listed: {error.strerror}")
    raise hinted(failure, look_near(error.filename)) from error


def _why_not_a_file(path: str) -> str | None:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if os.path.islink(path):
            return f"a link to {os.readlink(path)}, which can't be followed ({error.strerror})"
        return f"not there ({error.strerror})"
    if not stat.S_ISREG(mode):
        return "a pipe, socket or device, which can't be read twice; pipe it into --input -"
    return None if os.access(path, os.R_OK) else "not readable for you"


def _files_of_folder(folder: str) -> Iterator[FoundFile]:
    splits = _read_saved(os.path.join(folder, _DATASET_SPLITS), _Splits)
    if splits is not None:
        names = splits.splits
        raise InputError(
            f"--input {folder} holds the splits {', '.join(names)}: name the ones to read, such as "
            f"--input {folder}/{names[0] if names else 'train'}"
        )
    state = _read_saved(os.path.join(folder, _DATASET_STATE), _State)
    if state is None:
        files = _name_files(folder)
        error = InputError(f"--input {folder} is a folder: name its files, such as {files}")
        raise hinted(error, files)
    if state.indices_files or state.indices_data_files:
        raise InputError(
            f"--input {folder} is a selection of another dataset's rows; write it out with "
            "flatten_indices().save_to_disk(...) first"
        )
    for entry in state.data_files:
        yield from list_files(os.path.join(folder, entry.filename))


def _read_saved[Kind](path: str, kind: type[Kind]) -> Kind | None:
    """Read what `save_to_disk` wrote; None if it isn't there, or is another program's."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file, suppress(msgspec.MsgspecError):
        return msgspec.json.decode(file.read(), type=kind)
    return None


def _name_files(folder: str) -> str:
    """Options for a folder's files of the commonest format."""
    pattern = os.path.join(folder, "**")
    paths = [] if WILDCARD.search(folder) else sorted(_walk(pattern))
    by_suffix: dict[str, list[str]] = {}
    for path in (path for path in paths if "/." not in path[len(folder) :]):
        stem, _ = split_name(path)
        by_suffix.setdefault(path.removeprefix(os.path.splitext(stem)[0]), []).append(path)
    formats: dict[str, list[str]] = {}
    for suffix, found in sorted(by_suffix.items(), key=lambda item: -len(item[1])):
        kind = format_of_suffix(f".{suffix.split('.')[1]}") if suffix else None
        if kind or (suffix and _is_text(found[0])):
            formats.setdefault(kind or "text", []).append(suffix)
    suffixes = next(iter(formats.values()), [".jsonl"])
    named = [f"--input {pasted(os.path.join(folder, '**', '*' + suffix))}" for suffix in suffixes]
    is_known = all(format_of_suffix(f".{suffix.split('.')[1]}") for suffix in suffixes)
    return " ".join(named if is_known else ["--format text", *named])


def _is_text(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(_LOOKED_AT)
    except OSError:
        return False


def split_name(path: str) -> tuple[str, str]:
    """Split a path into its stem and its ending's compression."""
    stem, suffix = os.path.splitext(path)
    compression = _COMPRESSIONS.get(suffix.lower())
    return (path, "none") if compression is None else (stem, compression)
