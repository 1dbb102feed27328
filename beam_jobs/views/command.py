"""Make a view: `vocag add-teacher` and `vocag add-student`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs import storage
from beam_jobs.clusters import require_cluster
from beam_jobs.errors import OptionsError
from beam_jobs.locks import OUTPUT_LOCK, hold_lock
from beam_jobs.progress import reset_progress, run_with_token_bar
from beam_jobs.run_options import configure_logging
from beam_jobs.runners import exit_status, make_beam_options, make_runner, run_to_end
from beam_jobs.runs import LOCK_FILE, open_run, run_folder_of
from beam_jobs.tokenizer_files import store_tokenizer
from beam_jobs.transforms import Gather, Spread
from beam_jobs.views.disk import estimate_disk, require_disk
from beam_jobs.views.options import ViewRequest, own_options, parse_request
from beam_jobs.views.steps import (
    AddShard,
    ShardSeen,
    ViewJob,
    WriteShards,
    are_there,
    read_shards,
    text_of,
)
from beam_jobs.views.summary import summarise
from pipeline.alignment.quality import AlignmentStatistics
from pipeline.dataset.conventions import NOTHING, describe_tokenizer
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.tokenization import Tokenizer, load_tokenizer
from schemas.document import AlignedDocument, decode_document
from schemas.errors import DatasetError
from schemas.manifest import (
    MANIFEST_FILE,
    Manifest,
    TokenizerRecord,
    ViewRecord,
    decode_manifest,
    encode_manifest,
)
from schemas.view_file import Side
from schemas.viewed import find_view_files, view_manifest

_PROBED_DOCUMENTS = 64


class MissingTextError(DatasetError):
    """Documents whose text can't be had can't be tokenized anew."""


@dataclass(frozen=True)
class _Prepared:
    """A view before it is made.

    Attributes:
        request: what is asked for.
        dataset: of which, as it was aligned.
        tokenizer: the view's.
        record: of it, as the manifest will have it.
        beam_options: how the job runs.
    """

    request: ViewRequest
    dataset: Dataset
    tokenizer: Tokenizer
    record: TokenizerRecord
    beam_options: PipelineOptions


def add_view(request: ViewRequest) -> Manifest:
    """Make a view of a dataset, or what is left to do of one.

    Returns:
        The dataset's manifest, with the view in it.

    Raises:
        ValueError: the dataset, the tokenizer or an option can't be used.
        MissingTextError: documents whose text can't be had.
        JobError: the Beam job failed.

    Example:
        >>> request = ViewRequest("aligned", "teacher", "Qwen/Qwen2.5-0.5B", "qwen")
        >>> [view.name for view in add_view(request).views]  # doctest: +SKIP
        ['qwen']
    """
    started = time.monotonic()
    prepared = _prepare(request)
    request, dataset = prepared.request, prepared.dataset
    there = _find_view(dataset.manifest, prepared)
    run_folder = run_folder_of(request.output, _configuration(prepared))
    if there is not None and not _shards_to_do(there, dataset):
        storage.remove_folder(run_folder)  # of an attempt that died after its last step
        request.run.say(
            f'view "{there.name}" is finished: the same tokenizer and shards made it; nothing to do'
        )
        return dataset.manifest
    _probe(prepared, _shards_to_do(there, dataset))
    with hold_lock(storage.join(run_folder, LOCK_FILE), request.output):
        open_run(run_folder, _configuration(prepared))
        seen = _run(prepared, there, run_folder)
        manifest = _publish(prepared, there, seen, run_folder)
    storage.remove_folder(run_folder)
    seconds = time.monotonic() - started
    request.run.say(
        summarise(view_manifest(manifest, request.view_name), seen, request.output, seconds)
    )
    return manifest


def run_command(side: Side, arguments: Sequence[str] | None = None) -> int:
    """Run `vocag add-teacher` or `vocag add-student`; return its exit status."""

    def work() -> None:
        request = parse_request(side, arguments)
        configure_logging(f"add-{side}", request.run)
        add_view(request)

    return exit_status(f"add-{side}", work)


def build_pipeline(pipeline: beam.Pipeline, shards: Sequence[int], job: ViewJob) -> None:
    """Describe the job: a shard an element, for whichever worker is free."""
    _ = (
        pipeline
        | "Shards" >> beam.Create([str(shard) for shard in shards])
        | "SpreadShards" >> Spread()
        | "AddShard" >> beam.ParDo(AddShard(job)).with_output_types(str)
        | "GatherShards" >> Gather()
        | "WriteShards" >> beam.ParDo(WriteShards(job)).with_output_types(str)
    )


def _prepare(request: ViewRequest) -> _Prepared:
    """Return what the view is, checked as far as it can be before anything is written."""
    beam_options = make_beam_options(
        request.beam_arguments,
        run=request.run,
        command=f"add-{request.side}",
        own=own_options(request.side),
    )
    require_cluster(beam_options, {"the dataset": [request.output]})
    FileSystems.set_options(beam_options)
    request = replace(request, output=storage.absolute(request.output))
    dataset = open_dataset(request.output)
    tokenizer = load_tokenizer(
        request.tokenizer,
        special_strings=getattr(dataset.manifest, request.side).special_strings,
        fast=not request.no_fast_path,
    )
    after = request.after if request.side == "student" else NOTHING
    folder = f"tokenizers/views/{request.view_name}"
    record = describe_tokenizer(tokenizer, folder, before=request.before, after=after)
    return _Prepared(request, dataset, tokenizer, record, beam_options)


def _configuration(prepared: _Prepared) -> dict[str, str]:
    """Return what names a run: a dataset that grows meanwhile has the same one."""
    name, side = prepared.request.view_name, prepared.request.side
    return {"view": name, "side": side, "tokenizer": repr(_identity(prepared.record))}


def _identity(record: TokenizerRecord) -> tuple[object, ...]:
    return record.sha256, record.special_strings, record.around_text


def _find_view(manifest: Manifest, prepared: _Prepared) -> ViewRecord | None:
    """Return the view where it is there, whole or in part.

    Raises:
        OptionsError: another one has its name.
    """
    name, side = prepared.request.view_name, prepared.request.side
    there = next((view for view in manifest.views if view.name == name), None)
    if there is None:
        return None
    if (there.side, _identity(there.tokenizer)) != (side, _identity(prepared.record)):
        raise OptionsError(
            f"--name {name}: the dataset has a view of that name already, of {there.side} "
            f'"{there.tokenizer.source}" ({there.tokenizer.sha256[:16]}…, '
            f"{there.tokenizer.around_text}): choose another --name"
        )
    return there


def _shards_to_do(there: ViewRecord | None, dataset: Dataset) -> list[int]:
    """Return the shards without files; all of them where one of the view's files is gone."""
    shards = dataset.manifest.shards
    files = () if there is None else find_view_files(there, shards)
    if not all(are_there(record, dataset.location) for record in files):
        return list(range(len(shards)))
    done = {record.shard for record in files}
    return [number for number, shard in enumerate(shards) if shard.file not in done]


def _run(prepared: _Prepared, there: ViewRecord | None, run_folder: str) -> list[ShardSeen]:
    """Run the job on the shards that have no files yet, and return what became of them.

    Raises:
        MissingTextError: documents whose text can't be had; nothing of the view is left.
    """
    request, dataset = prepared.request, prepared.dataset
    path = storage.join(request.output, *prepared.record.file.split("/"))
    job = ViewJob(
        output=request.output,
        run_folder=run_folder,
        dataset=dataset.manifest.fingerprint,
        name=request.view_name,
        side=request.side,
        tokenizer=store_tokenizer(prepared.tokenizer, path, scratch=run_folder),
    )
    shards = _shards_to_do(there, dataset)
    reset_progress(run_folder)
    options = prepared.beam_options
    pipeline = beam.Pipeline(runner=make_runner(options), options=options)
    build_pipeline(pipeline, shards, job)
    other = "student" if request.side == "teacher" else "teacher"
    records = [dataset.manifest.shards[shard] for shard in shards]
    num_tokens = sum(getattr(record, f"num_{other}_tokens") for record in records)
    bar = partial(
        run_with_token_bar,
        run_folder,
        num_tokens=num_tokens,
        quiet=request.run.quiet,
        verbs=("aligning", "aligned"),
        side=other,
    )
    run_to_end(pipeline, run_folder, run=request.run, with_bar=bar)
    seen = read_shards(job)
    missing = sum(shard.num_without_text for shard in seen)
    if missing:
        _clean_up(seen, job)
        first = next(shard.without_text for shard in seen if shard.num_without_text)
        total = sum(shard.num_documents for shard in seen)
        raise MissingTextError(_without_text(missing, total, first, request.output))
    return seen


def _probe(prepared: _Prepared, shards_to_do: Sequence[int]) -> None:
    """Try both paths of the tokenizer on the first documents, whose texts must be there.

    Raises:
        MissingTextError: they are not.
        OptionsError: by them, the disk is too small for the view.
    """
    dataset, request = prepared.dataset, prepared.request
    documents: list[AlignedDocument] = []
    texts: list[bytes] = []
    lost: list[str] = []
    for shard, record in enumerate(dataset.manifest.shards):
        if not record.num_documents:
            continue
        samples = dataset.samples(shard, dataset.read_index(shard, with_names=True))
        for _, sample in islice(samples, _PROBED_DOCUMENTS):
            document = decode_document(sample)
            text = text_of(document, dataset)
            lost += [document.document_id] if text is None else []
            if text is not None:
                documents.append(document)
                texts.append(text)
        break
    if lost:
        total = f"the first {len(texts) + len(lost)}"
        raise MissingTextError(_without_text(len(lost), total, lost[0], request.output))
    prepared.tokenizer.check_fast_path(texts)
    shards = [dataset.manifest.shards[shard] for shard in shards_to_do]
    if texts:
        need = estimate_disk(documents, texts, shards, prepared.tokenizer, request.side)
        require_disk(
            request.output, request.view_name, need, num_documents=len(texts), shards=shards
        )


def _without_text(count: int, total: int | str, first: str, output: str) -> str:
    return (
        f'{count} of {total} documents of {output}, such as "{first}", keep no text, and neither '
        "the student's nor the teacher's tokens spell it (SHA-256 compared): align the corpus with "
        "the new tokenizer, or again with --keep-text"
    )


def _clean_up(seen: Sequence[ShardSeen], job: ViewJob) -> None:
    """Remove the files of a view that can't be made, and its run."""
    records = [shard.record for shard in seen if shard.record is not None]
    names = [name for record in records for name in (record.file, record.index_file)]
    storage.delete_files(job.output, names)
    storage.remove_folder(job.tokenizer.path.rsplit("/", 1)[0])
    storage.remove_folder(job.run_folder)


def _publish(
    prepared: _Prepared, there: ViewRecord | None, seen: Sequence[ShardSeen], run_folder: str
) -> Manifest:
    """Put the view into the manifest, which may have grown meanwhile, and return that."""
    request = prepared.request
    output, name = request.output, request.view_name
    path = storage.join(output, MANIFEST_FILE)
    with hold_lock(storage.join(output, OUTPUT_LOCK), output):
        manifest = decode_manifest(storage.read_bytes(path), where=path)
        kept = [v for v in manifest.views if v.name != name]
        view = _view_record(prepared, there, seen, manifest)
        views = sorted([*kept, view], key=lambda entry: entry.name)
        manifest = replace(manifest, views=tuple(views))
        storage.write_atomically(path, encode_manifest(manifest), scratch=run_folder)
    return manifest


def _view_record(
    prepared: _Prepared, there: ViewRecord | None, seen: Sequence[ShardSeen], manifest: Manifest
) -> ViewRecord:
    """Return what the manifest says of the view: its new files, behind those that stay."""
    new = [shard.record for shard in seen if shard.record is not None]
    shards = {record.shard for record in new}
    kept = [] if there is None else [file for file in there.files if file.shard not in shards]
    statistics = [shard.statistics for shard in seen]
    if there is not None and kept:
        statistics.insert(0, there.statistics)
    view = ViewRecord(
        name=prepared.request.view_name,
        side=prepared.request.side,
        tokenizer=prepared.record,
        files=(*kept, *new),
        statistics=AlignmentStatistics.merge(
            map(AlignmentStatistics.from_json, statistics)
        ).to_json(),
    )
    files = find_view_files(view, manifest.shards)
    if not files:
        raise OptionsError(
            f"{prepared.request.output} has other shards than when the view was begun: run the "
            "same command again"
        )
    return replace(view, files=files)
