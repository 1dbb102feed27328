"""`vocag remove`: a generation that leaves documents out, without a shard being rewritten."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import numpy as np
from apache_beam.io.filesystems import FileSystems

from beam_jobs import storage
from beam_jobs.errors import OptionsError
from beam_jobs.generations import keep_manifest, publish_manifest, read_newest
from beam_jobs.locks import OUTPUT_LOCK, hold_lock
from beam_jobs.remove.ids import find_documents, read_ids
from beam_jobs.report.summary import write_card
from beam_jobs.running.runners import exit_status, make_beam_options
from pipeline.dataset.files import Dataset
from pipeline.drawing.formatting import format_count, format_plural
from schemas.manifest import Manifest, RemovedRecord, next_generation
from schemas.removed import RemovedDocuments, decode_removed, encode_removed
from vocag_cli import options as command_lines
from vocag_cli.options import DatasetSource, Option, Rest

_MAX_NAMED = 5
_SCRATCH = ".vocag-remove"
_EXAMPLES = """\
examples:
  # takedowns: one id a line
  vocag remove aligned --ids takedowns.txt

  # documents that hold questions of test sets, some of them left out already
  vocag overlap aligned --output overlap
  vocag remove aligned --ids overlap/overlap.jsonl

  # what would that take out? (nothing is written)
  vocag remove gs://bucket/aligned --ids takedowns.txt --ignore-unknown --dry-run

the list: one id a line; in a file .jsonl or .ndjson, one JSON object a line with document_id or id.

The dataset gets another generation. New runs never see these documents again; a run that was
started before goes on with exactly its rows, unless it is told --generation latest. The documents'
bytes stay in the shards: vocag align --input DATASET --output NEW writes a dataset without them.
Their ids stay taken, so that vocag align --append does not bring them back.

exit status: 0 done, or nothing was left to do; 2 asked for wrongly, and nothing was written.

Every other option goes to Apache Beam (for an object store)."""


@dataclass(frozen=True)
class RemoveOptions:
    """Take documents out of a finished dataset, at once and without rewriting a shard.

    Run the same command again where it was interrupted.

    Attributes:
        dataset: folder or URL of a dataset.
        ids: list of the documents' ids.
        ignore_unknown: say how many ids no document has, instead of refusing the list.
        dry_run: say what would be removed; write nothing.
        quiet: say nothing but errors.
        beam_arguments: options for Beam.
    """

    dataset: DatasetSource
    ids: Annotated[str, Option("FILE")]
    ignore_unknown: bool = False
    dry_run: bool = False
    quiet: bool = False
    beam_arguments: Rest = ()


def remove(options: RemoveOptions) -> Manifest:
    """Take documents out of a dataset.

    Returns:
        The dataset's manifest; the newest generation's, also where there was nothing to do.

    Raises:
        OptionsError: no dataset, no list, or ids that no document has.
        DatasetError: the dataset is damaged.

    Example:
        >>> remove(RemoveOptions("aligned", "takedowns.txt")).removed.count  # doctest: +SKIP
        2
    """
    own = command_lines.option_names(RemoveOptions)
    FileSystems.set_options(make_beam_options(options.beam_arguments, command="remove", own=own))
    output = storage.absolute(options.dataset)
    storage.require_answer(output)
    ids = read_ids(options.ids)
    read_newest(output)  # refuses before a lock is made where no dataset is
    with hold_lock(storage.join(output, OUTPUT_LOCK), output):
        manifest = read_newest(output)
        wanted, unknown = find_documents(Dataset(output, manifest), ids)
        _require_known(unknown, options)
        before = _removed_before(output, manifest)
        removed = _union(before, wanted)
        num_new = len(removed) - len(before)
        _say(options, wanted, unknown, num_new)
        if options.dry_run:
            return manifest
        if num_new:
            manifest = _write(output, manifest, removed)
        _tidy(output, manifest)
    if not options.quiet:
        print(f"{output} is at generation {manifest.generation}")
    return manifest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""

    def work() -> None:
        remove(
            command_lines.parse_options(
                RemoveOptions, arguments, prog="vocag remove", epilog=_EXAMPLES
            )
        )

    return exit_status("remove", work)


def _write(output: str, manifest: Manifest, removed: RemovedDocuments) -> Manifest:
    """Write the list, keep the manifest, and let the next one take its place, in this order."""
    data = encode_removed(removed)
    digest = sha256(data).hexdigest()
    file = f"removed-g{manifest.generation + 1:03d}.parquet"
    following = next_generation(manifest, removed=RemovedRecord(file, digest, len(removed)))
    scratch = storage.join(output, _SCRATCH)
    storage.make_folder(scratch)
    storage.write_atomically(storage.join(output, file), data, scratch=scratch)
    keep_manifest(output, manifest, scratch=scratch)
    publish_manifest(output, following, scratch=scratch)
    return following


def _tidy(output: str, manifest: Manifest) -> None:
    """Write the card, and remove temporary files, also those of a command that was killed."""
    scratch = storage.join(output, _SCRATCH)
    storage.make_folder(scratch)
    write_card(manifest, output=output, scratch=scratch)
    storage.remove_folder(scratch)


def _require_known(unknown: Sequence[str], options: RemoveOptions) -> None:
    if unknown and not options.ignore_unknown:
        named = ", ".join(f'"{name}"' for name in unknown[:_MAX_NAMED])
        raise OptionsError(
            f"--ids {options.ids}: {format_plural(len(unknown), 'id')} of no document in "
            f"{options.dataset}, such as {named}; nothing is removed: correct the list, or give "
            "--ignore-unknown"
        )


def _removed_before(output: str, manifest: Manifest) -> RemovedDocuments:
    if manifest.removed is None:
        return RemovedDocuments(np.empty(0, np.int64), np.empty(0, np.int64))
    return decode_removed(storage.read_bytes(storage.join(output, manifest.removed.file)))


def _union(first: RemovedDocuments, second: RemovedDocuments) -> RemovedDocuments:
    places = [(removed.shard << 32) + removed.document for removed in (first, second)]
    union = np.unique(np.concatenate(places))
    return RemovedDocuments(union >> 32, union & 0xFFFFFFFF)


def _say(
    options: RemoveOptions, wanted: RemovedDocuments, unknown: Sequence[str], num_new: int
) -> None:
    if options.quiet:
        return
    removed = "would be removed" if options.dry_run else "removed"
    told = [f"{format_plural(num_new, 'document')} {removed}"]
    if len(wanted) > num_new:
        told.append(f"{format_count(len(wanted) - num_new)} of the list were removed before")
    if unknown:
        told.append(f"{format_plural(len(unknown), 'id')} of no document")
    print("; ".join(told))
