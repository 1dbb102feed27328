"""`vocag compact`: a dataset written anew, without the documents that were removed from it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Annotated, Any

from apache_beam.io.filesystems import FileSystems
from tqdm import tqdm

from beam_jobs import storage
from beam_jobs.align.summary import write_card
from beam_jobs.edit.carried import (
    Carried,
    CopiedShard,
    copy_carried,
    find_carried,
    find_copied,
    keep_copied,
)
from beam_jobs.edit.disk import require_disk
from beam_jobs.edit.losses import say_other_length, write_score_manifest
from beam_jobs.edit.shards import measure_removed
from beam_jobs.errors import OptionsError
from beam_jobs.generations import publish_manifest, read_kept, read_newest
from beam_jobs.locks import OUTPUT_LOCK, hold_lock
from beam_jobs.runners import exit_status, make_beam_options
from beam_jobs.runs import find_finished, open_run, run_folder_of
from pipeline.alignment.quality import AlignmentStatistics
from pipeline.dataset.files import Dataset
from pipeline.drawing.formatting import format_bytes, format_plural
from schemas.errors import DatasetError
from schemas.manifest import (
    DEAD_LETTERS_FILE,
    DeadLetterRecord,
    Manifest,
    TokenizerRecord,
    ViewRecord,
)
from schemas.sidecar import score_manifest_name
from vocag_cli import options as command_lines
from vocag_cli.options import DatasetSource, Folder, Option, Rest

_COPIED_AT_ONCE = 8
_EXAMPLES = """\
examples:
  # takedowns, first for readers and then for good
  vocag remove aligned --ids takedowns.txt
  vocag compact aligned --output aligned-clean
  vocag validate aligned-clean

The new dataset has one generation, and no trace of the removed documents' tokens, texts and ids but
those in dead letters. Shards of which nothing is removed are copied; the others are, byte for byte,
what align makes of the documents that are left. Views and the losses that teachers have given come
along, less the removed documents': what vocag add-teacher and vocag add-student would give again,
and the losses as they were stored. What an unfinished vocag score has left does not, which is said
before it starts. Runs that were started on the old dataset need it to go on. Killed and run again,
it keeps the shards that are finished.

Every other option goes to Apache Beam (for an object store)."""


@dataclass(frozen=True)
class CompactOptions:
    """Write a dataset anew, without the documents that were removed from it.

    Views and finished scores come along. Run the same command again where it was interrupted.

    Attributes:
        dataset: folder or URL of a dataset.
        output: where the new dataset goes, local or in an object store.
        quiet: say nothing but errors.
        beam_arguments: options for Beam.
    """

    dataset: DatasetSource
    output: Annotated[Folder, Option("NEW")]
    quiet: bool = False
    beam_arguments: Rest = ()


def compact(options: CompactOptions) -> Manifest:
    """Write a dataset without its removed documents, or return it where that is done.

    Raises:
        OptionsError: no dataset, an output that holds something else, or too small a disk.
        DatasetError: the dataset is damaged, or has lost documents of format version 1.

    Example:
        >>> compact(CompactOptions("aligned", "aligned-clean")).generation  # doctest: +SKIP
        0
    """
    own = command_lines.option_names(CompactOptions)
    FileSystems.set_options(make_beam_options(options.beam_arguments, command="compact", own=own))
    source, output = storage.absolute(options.dataset), storage.absolute(options.output)
    for place in (source, output):
        storage.require_answer(place)
    if f"{output}/".startswith(f"{source}/"):
        raise OptionsError(f"--output {output} lies in the dataset: name another folder")
    before = read_newest(source)
    configuration = _configuration(before)
    with hold_lock(storage.join(output, OUTPUT_LOCK), output):
        manifest = find_finished(output, configuration)
        if manifest is None:
            carried = find_carried(Dataset(source, before))
            if not options.quiet:
                print("".join(f"{line}\n" for line in carried.remarks), end="", flush=True)
            require_disk(output, carried)
            manifest = _make(carried, output, configuration, quiet=options.quiet)
            if not options.quiet:
                print(_describe_carried(carried, manifest), end="")
        _tidy(output, manifest)
    if not options.quiet:
        num_left_out = before.totals["num_documents"] - manifest.totals["num_documents"]
        num_bytes = before.totals["num_bytes"] - manifest.totals["num_bytes"]
        print(
            f"{output}: {format_plural(manifest.totals['num_documents'], 'document')}, "
            f"{num_left_out} left out, {format_bytes(num_bytes)} less"
        )
    return manifest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""

    def work() -> None:
        compact(
            command_lines.parse_options(
                CompactOptions, arguments, prog="vocag compact", epilog=_EXAMPLES
            )
        )

    return exit_status("compact", work)


def _make(
    carried: Carried, output: str, configuration: Mapping[str, Any], *, quiet: bool
) -> Manifest:
    """Write everything, the manifest last; of an attempt that died, finished shards are kept."""
    scratch = run_folder_of(output, configuration)
    open_run(scratch, configuration)
    dataset, before = carried.dataset, carried.dataset.manifest
    copied = _copy_shards(carried, output, scratch, quiet=quiet)
    views = tuple(_view_record(seen, copied) for seen in carried.views)
    for record in (before.student, before.teacher, *(view.tokenizer for view in views)):
        _copy_tokenizer(dataset, record, output, scratch)
    manifest = Manifest(
        name=before.name,
        student=before.student,
        teacher=before.teacher,
        shards=tuple(each.shard for each in copied),
        dead_letters=_copy_dead_letters(dataset, output, scratch),
        configuration=configuration,
        statistics=_statistics(dataset, before.statistics),
        metadata=before.metadata,
        views=views,
    )
    for scores in carried.complete_scores():
        sidecars = [each.losses[scores.teacher] for each in copied]
        write_score_manifest(scores, sidecars, manifest, output, scratch=scratch)
    publish_manifest(output, manifest, scratch=scratch)
    return manifest


def _describe_carried(carried: Carried, made: Manifest) -> str:
    """Return lines that say what came along, and what changes for who reads it."""
    complete = carried.complete_scores()
    along = [f"view {view.name}" for view in made.views]
    along += [f"losses of {score_manifest_name(scores.teacher)}" for scores in complete]
    told = f"carried over: {', '.join(along)}\n" if along else ""
    return told + "".join(say_other_length(scores, made) for scores in complete)


def _tidy(output: str, manifest: Manifest) -> None:
    """Write the card, and remove temporary files, also those of a command that was killed."""
    scratch = run_folder_of(output, manifest.configuration)
    storage.make_folder(scratch)
    write_card(manifest, output=output, scratch=scratch)
    storage.remove_folder(scratch)


def _configuration(before: Manifest) -> dict[str, Any]:
    """Return what determines the new dataset: the old one's options, and the old one."""
    kept = {name: value for name, value in before.configuration.items() if name != "append_to"}
    return {"name": before.name, **kept, "compacted_from": before.fingerprint}


def _copy_shards(carried: Carried, output: str, scratch: str, *, quiet: bool) -> list[CopiedShard]:
    """Write the shards, numbered anew, and what stands beside them; those that are there stay."""
    name, total = carried.dataset.manifest.name, len(carried.numbers)
    there = storage.list_folder(output)

    def copy(place: int) -> CopiedShard:
        number = carried.numbers[place]
        commit = storage.join(scratch, f"commit-{place:06d}.json")
        copied = find_copied(carried, number, commit, there)
        if copied is None:
            stem = f"{name}-{place:06d}-of-{total:06d}"
            copied = copy_carried(carried, number, output, stem)
            keep_copied(copied, commit, scratch=scratch)
        return copied

    with ThreadPoolExecutor(_COPIED_AT_ONCE) as pool:
        copied = pool.map(copy, range(total))
        return list(tqdm(copied, "shards", total, unit="", leave=False, disable=quiet))


def _view_record(seen: Dataset, copied: Sequence[CopiedShard]) -> ViewRecord:
    """Return what the new manifest says of a view."""
    assert seen.view is not None
    name = seen.view.name
    files = tuple(each.views[name] for each in copied if name in each.views)
    statistics = _statistics(seen, seen.view.statistics)
    return replace(seen.view, files=files, statistics=statistics)


def _statistics(dataset: Dataset, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return statistics, of the dataset or of the view that it is seen through, less the removed.

    Sums of fractions may differ in their last digit from what counting anew gives.
    """
    numbers = range(len(dataset.manifest.shards))
    with ThreadPoolExecutor(_COPIED_AT_ONCE) as pool:
        parts = pool.map(lambda number: measure_removed(dataset, number), numbers)
        removed = AlignmentStatistics.merge(parts)
    all_of_it = AlignmentStatistics.from_json(dict(whole))
    names = [entry.name for entry in fields(AlignmentStatistics)]
    left = {name: getattr(all_of_it, name) - getattr(removed, name) for name in names}
    return AlignmentStatistics(**left).to_json()


def _copy_tokenizer(dataset: Dataset, record: TokenizerRecord, output: str, scratch: str) -> None:
    data = storage.read_bytes(storage.join(dataset.location, *record.file.split("/")))
    if sha256(data).hexdigest() != record.sha256:
        raise DatasetError(
            f"{dataset.location}/{record.file} is not the tokenizer that the manifest names "
            "(SHA-256 differs): restore it"
        )
    path = storage.join(output, *record.file.split("/"))
    storage.make_folder(path.rpartition("/")[0])
    storage.write_atomically(path, data, scratch=scratch)


def _copy_dead_letters(dataset: Dataset, output: str, scratch: str) -> DeadLetterRecord:
    """Write the dead letters of all generations, one after another, as one list."""
    newest = dataset.manifest
    earlier = [read_kept(dataset.location, entry.number) for entry in newest.generations]
    records = {each.dead_letters.file: each.dead_letters for each in (*earlier, newest)}
    data, by_reason = b"", Counter[str]()
    for record in records.values():
        data += storage.read_bytes(storage.join(dataset.location, record.file))
        by_reason.update(record.by_reason)
    path = storage.join(output, DEAD_LETTERS_FILE)
    storage.write_atomically(path, data, scratch=scratch)
    counts = dict(sorted(by_reason.items()))
    return DeadLetterRecord(
        DEAD_LETTERS_FILE, sha256(data).hexdigest(), sum(counts.values()), counts
    )
