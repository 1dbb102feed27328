"""Remove documents by a new generation; shards stay unchanged."""

import codecs
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.io.filesystems import FileSystems
from numpy.typing import NDArray

from beam_jobs import storage
from beam_jobs.first_bytes import why_not_utf8
from beam_jobs.generations import keep_manifest, publish_manifest, read_newest
from beam_jobs.hub_copies import output_here
from beam_jobs.job_errors import OptionsError
from beam_jobs.locks import OUTPUT_LOCK, hold_lock
from beam_jobs.remove.options import RemoveOptions
from beam_jobs.report.run_summary import write_card
from beam_jobs.running.run_options import RunOptions
from beam_jobs.running.runners import make_beam_options
from pipeline.command_line.failures import hinted
from pipeline.command_line.nearest import look_near
from pipeline.command_line.option_parsing import option_names
from pipeline.command_line.pasted import pasted
from pipeline.dataset.dataset_reading import folder_of
from pipeline.dataset.files import Dataset
from pipeline.drawing.formatting import format_count, format_plural
from schemas.manifest import Manifest, RemovedRecord, next_generation
from schemas.removed import RemovedDocuments, encode_removed

_MAX_NAMED = 5
_SCRATCH = ".vocag-remove"
_JSON_LINES = (".jsonl", ".ndjson")
_FIELDS = ("document_id", "id")
_OTHER_READERS = """\
note: the shards still hold removed documents, and readers other than vocag deliver them
next: """
_WITHOUT = "vocag align --input {} --output {}  # writes a dataset without them"
_CHATS_WITHOUT = "align the conversations again without these, for a dataset that doesn't hold them"


def remove(options: RemoveOptions) -> Manifest:
    """Take documents out of a dataset; return its newest manifest.

    Raises:
        OptionsError: no dataset, no list, or ids that no document has.
        DatasetError: the dataset is damaged.

    Example:
        >>> remove(RemoveOptions("aligned", "takedowns.txt")).removed.count  # doctest: +SKIP
        2
    """
    say = RunOptions(quiet=options.quiet).say
    named = folder_of(options.dataset)
    with output_here(named, say, uploads=not options.dry_run) as location:
        return _remove(replace(options, dataset=location), say, named)


def read_ids(path: str) -> list[str]:
    """Return the ids in a file, or in standard input for "-", each once, in its order.

    One id a line; in .jsonl or .ndjson, a JSON string or an object with `document_id` or `id`.
    OptionsError if the file is missing, empty or not UTF-8, or a line has no id.
    """
    try:
        data = _read_standard_input() if path == "-" else storage.read_bytes(path)
    except FileNotFoundError as error:
        missing = OptionsError(f"--ids {path} is not there; name a file of ids, one a line")
        raise (hinted(missing, look_near(path)) if storage.is_local(path) else missing) from error
    except IsADirectoryError as error:
        raise OptionsError(f"--ids {path} is a folder; name a file of ids, one a line") from error
    if why := why_not_utf8(data):
        raise OptionsError(f"--ids {path}: {why}")
    lines = data.removeprefix(codecs.BOM_UTF8).splitlines()
    read = _read_json if path.endswith(_JSON_LINES) else bytes.decode
    ids = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                ids.append(read(line))
            except (ValueError, TypeError) as error:
                raise OptionsError(f"--ids {path}: line {number} holds no id ({error})") from error
    if not ids:
        raise OptionsError(f"--ids {path} lists no id; write one a line")
    return list(dict.fromkeys(ids))


def find_documents(dataset: Dataset, ids: list[str]) -> tuple[RemovedDocuments, list[str]]:
    """Find documents by id; also return unknown ids. Errors as in `Dataset.read_ids`."""
    wanted = pa.array(ids, pa.string())

    def match(shard_index: int) -> tuple[NDArray[np.int64], pa.Array]:
        names = dataset.read_ids(shard_index)
        places = np.flatnonzero(pc.is_in(names, value_set=wanted).to_numpy())
        return places, pa.array(names.take(places).to_pylist(), pa.string())

    matches = list(dataset.map_shards(match))
    places = [np.empty(0, np.int64), *(own for own, _ in matches)]
    shards = np.repeat(np.arange(len(places)) - 1, [len(own) for own in places])
    found = pa.concat_arrays([pa.array([], pa.string()), *(names for _, names in matches)])
    unknown = wanted.filter(pc.invert(pc.is_in(wanted, value_set=found)))
    return RemovedDocuments(shards, np.concatenate(places)), unknown.to_pylist()


def _remove(options: RemoveOptions, say: Callable[[str], object], named: str) -> Manifest:
    own = option_names(RemoveOptions)
    beam_options = make_beam_options(options.beam_arguments, command="remove", own=own)
    FileSystems.set_options(beam_options)
    location = storage.absolute(options.dataset)
    storage.require_answer(location)
    ids = read_ids(options.ids)
    read_newest(location)  # refuses before a lock is made if there is no dataset
    lock = hold_lock(storage.join(location, OUTPUT_LOCK), location)
    with nullcontext() if options.dry_run else lock:
        manifest = read_newest(location)
        dataset = Dataset(location, manifest)
        wanted, unknown = find_documents(dataset, ids)
        _require_known(unknown, options)
        before = dataset.removed or RemovedDocuments(np.empty(0, np.int64), np.empty(0, np.int64))
        removed = _union(before, wanted)
        num_new = len(removed) - len(before)
        if num_new and not options.dry_run:
            manifest = _write(location, manifest, removed)
        say(_describe(options, wanted, unknown, num_new))
        if options.dry_run:
            return manifest
        _tidy(location, manifest)
    say(f"{location} is at generation {manifest.generation}")
    if manifest.removed:
        anew = _WITHOUT.format(pasted(named), pasted(f"{named}-clean"))  # of the hub, no copy
        say(_OTHER_READERS + (anew if manifest.chats is None else _CHATS_WITHOUT))
    return manifest


def _write(location: str, manifest: Manifest, removed: RemovedDocuments) -> Manifest:
    """Write the list, keep the manifest, then publish the next."""
    data = encode_removed(removed)
    digest = sha256(data).hexdigest()
    file = f"removed-g{manifest.generation + 1:03d}.parquet"
    following = next_generation(manifest, removed=RemovedRecord(file, digest, len(removed)))
    scratch = storage.join(location, _SCRATCH)
    storage.make_folder(scratch)
    storage.write_atomically(storage.join(location, file), data, scratch=scratch)
    keep_manifest(location, manifest, scratch=scratch)
    publish_manifest(location, following, scratch=scratch)
    return following


def _tidy(location: str, manifest: Manifest) -> None:
    scratch = storage.join(location, _SCRATCH)
    storage.make_folder(scratch)
    write_card(manifest, output=location, scratch=scratch)
    storage.remove_folder(scratch)


def _require_known(unknown: Sequence[str], options: RemoveOptions) -> None:
    if unknown and not options.ignore_unknown:
        named = ", ".join(f'"{name}"' for name in unknown[:_MAX_NAMED])
        raise OptionsError(
            f"--ids {options.ids}: {format_plural(len(unknown), 'id')} of no document in "
            f"{options.dataset}, such as {named}; nothing is removed: correct the list, or give "
            "--ignore-unknown"
        )


def _read_standard_input() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin else b""  # None if it is closed


def _union(first: RemovedDocuments, second: RemovedDocuments) -> RemovedDocuments:
    places = [(removed.shard << 32) + removed.document for removed in (first, second)]
    union = np.unique(np.concatenate(places))
    return RemovedDocuments(union >> 32, union & 0xFFFFFFFF)


def _describe(
    options: RemoveOptions, wanted: RemovedDocuments, unknown: Sequence[str], num_new: int
) -> str:
    removed = "would be removed" if options.dry_run else "removed"
    told = [f"{format_plural(num_new, 'document')} {removed}"]
    if len(wanted) > num_new:
        told.append(f"{format_count(len(wanted) - num_new)} of the list removed before")
    if unknown:
        told.append(f"{format_plural(len(unknown), 'id')} of no document")
    return "; ".join(told)


def _read_json(line: bytes) -> str:
    value: Any = orjson.loads(line)
    if isinstance(value, dict):
        value = next((value[name] for name in _FIELDS if value.get(name) is not None), None)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise TypeError("write a string, or an object with document_id or id")
    return value
