"""`python -m beam_jobs.align`: documents in, verified aligned shards out."""

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs import storage
from beam_jobs.align.append import append_configuration, find_appended, rules_of
from beam_jobs.align.dry_run import describe_job
from beam_jobs.align.inputs.files import describe_inputs
from beam_jobs.align.inputs.input_identity import (
    INPUTS_FILE,
    encode_inputs,
    publish_inputs,
    require_same_inputs,
)
from beam_jobs.align.inputs.listing import InputError
from beam_jobs.align.inputs.lost_texts import (
    LostTextsError,
    count_lost_texts,
    describe_lost_texts,
    read_lost_texts,
)
from beam_jobs.align.inputs.overlap import digest_of_overlap, read_overlap
from beam_jobs.align.inputs.pieces import InputFile, count_buckets, plan_tasks
from beam_jobs.align.inputs.probes import probe_documents, settle_metadata, usable_texts
from beam_jobs.align.inputs.reading import ReadingRules, Reason
from beam_jobs.align.inputs.standard_input import STANDARD_INPUT, spool_standard_input
from beam_jobs.align.inputs.taken_ids import plan_taken_ids
from beam_jobs.align.job import Job
from beam_jobs.align.opened import OpenedInput, open_input
from beam_jobs.align.options import AlignOptions, own_options, parse_options
from beam_jobs.align.resources import (
    choose_shuffle,
    estimate_disk,
    require_disk,
)
from beam_jobs.align.steps import (
    AlignBucket,
    NumberShards,
    PublishShards,
    ReadBlocks,
    WriteManifest,
)
from beam_jobs.generations import keep_manifest, read_newest
from beam_jobs.left_out import (
    Losses,
    count_lost,
    count_reasons,
    read_losses,
    require_few_losses,
)
from beam_jobs.locks import OUTPUT_LOCK, hold_lock
from beam_jobs.report.page import RunSummary
from beam_jobs.report.summary import library_versions, read_summary, summarise, write_report
from beam_jobs.running.clusters import require_cluster
from beam_jobs.running.progress import reset_progress, run_with_bar
from beam_jobs.running.run_options import RunOptions, configure_logging
from beam_jobs.running.runners import (
    describe_runner,
    exit_status,
    make_beam_options,
    make_runner,
    run_to_end,
)
from beam_jobs.runs import (
    SUMMARY_FILE,
    close_run,
    find_finished,
    open_run,
    run_folder_of,
    warn_of_lost_files,
)
from beam_jobs.tokenizer_files import store_tokenizer
from beam_jobs.transforms import Gather, Spread
from pipeline.dataset.conventions import NOTHING, describe_convention, describe_tokenizer
from pipeline.dataset.reading import read_manifest
from pipeline.drawing.formatting import format_count, format_plural
from pipeline.tokenization import Tokenizer
from schemas.document import SCHEMA_VERSION
from schemas.manifest import MANIFEST_FILE, Manifest, TokenizerRecord

logger = logging.getLogger(__name__)


def build_pipeline(pipeline: beam.Pipeline, tasks: Sequence[str], job: Job) -> None:
    """Describe the job: one chain, no tagged outputs and no side inputs.

    The shuffle carries text, not tensors, and the bucket of a document is a function of its id, so
    what is in a shard depends neither on the runner nor on the number of workers.
    """
    _ = (
        pipeline
        | "Tasks" >> beam.Create(tasks)
        | "SpreadTasks" >> Spread()
        | "ReadDocuments" >> beam.ParDo(ReadBlocks(job)).with_output_types(tuple[int, bytes])
        | "GroupByBucket" >> beam.GroupByKey()
        | "AlignAndWrite" >> beam.ParDo(AlignBucket(job)).with_output_types(str)
        | "GatherBuckets" >> Gather()
        | "NumberShards" >> beam.ParDo(NumberShards(job)).with_output_types(str)
        | "SpreadShards" >> Spread()
        | "PublishShards" >> beam.ParDo(PublishShards(job)).with_output_types(str)
        | "GatherShards" >> Gather()
        | "WriteManifest" >> beam.ParDo(WriteManifest(job)).with_output_types(str)
    )


def align(options: AlignOptions) -> Manifest:
    """Make the dataset that the options ask for, or return it where it is finished already.

    Returns:
        The dataset's manifest.

    Raises:
        ValueError: the input, a tokenizer, an option or the output folder can't be used.
        NoAnswerError: an object store is silent.
        JobError: the Beam job failed.
        TooManyDeadLettersError: the dataset is written, but too much of the input is left out.

    Example:
        >>> options = AlignOptions(("corpus/*.jsonl",), "aligned", "llama2", "qwen2_5")
        >>> align(options).totals["num_documents"]  # doctest: +SKIP
        1000
    """
    started, clock = time.time(), time.monotonic()
    options, beam_options = _settle(options)
    for place in (*options.input, options.output):
        storage.require_answer(place)
    with spool_standard_input(options.input, options.output, format=options.format) as patterns:
        options = replace(options, input=patterns)
        return _align(options, beam_options, started=started, clock=clock)


def _align(
    options: AlignOptions, beam_options: PipelineOptions, *, started: float, clock: float
) -> Manifest:
    opened = open_input(options)
    configuration = configure(opened)  # refuses what can't be appended to
    if storage.num_bytes_of(storage.join(options.output, MANIFEST_FILE)) is not None:
        finished = _find_finished(opened, configuration)
        if finished is not None:
            return finished
    with hold_lock(storage.join(options.output, OUTPUT_LOCK), options.output):
        # Who held the lock until now may have finished the same dataset, or let it grow.
        configuration = configure(opened)
        finished = _find_finished(opened, configuration)
        return finished or _make(opened, beam_options, configuration, started=started, clock=clock)


def describe(options: AlignOptions) -> str:
    """Return what `align` would do with the options; nothing is written.

    Raises:
        ValueError: the input, a tokenizer, an option or the output folder can't be used.
    """
    if STANDARD_INPUT in options.input:
        raise InputError(
            "--dry-run reads a sample, and standard input can't be read again: save it"
        )
    options, _ = _settle(options)
    opened = open_input(options)
    _find_made(opened.options, configure(opened))  # refuses what align would
    return describe_job(opened.options, opened.files, opened.tokenizers)


def configure(opened: OpenedInput) -> dict[str, Any]:
    """Return everything that determines the dataset, and nothing else.

    Raises:
        OptionsError: --append, and there is no dataset, or one made with other options.
    """
    options, dataset = opened.options, opened.dataset
    size: dict[str, Any] = {
        "shard_bytes": options.shard_bytes,
        "keep_text": bool(options.keep_text),
    }
    count = partial(count_buckets, opened.files) if dataset is None else dataset.count_buckets
    configuration = {
        "schema_version": SCHEMA_VERSION,
        "name": options.name,
        "num_buckets": count(**size),
        **size,
        "special_strings": options.special_strings,
        "format": options.format,
        "student_sha256": opened.tokenizers[0].sha256,
        "teacher_sha256": opened.tokenizers[1].sha256,
        **asdict(options.rules),
        "metadata": opened.metadata,
        **describe_inputs(opened.files),
        **({} if dataset is None else dataset.identity),
        **_chosen_conventions(options, opened.tokenizers),
        **_excluded(options),
    }
    return append_configuration(options.output, configuration) if options.append else configuration


def prepare_job(
    opened: OpenedInput,
    configuration: dict[str, Any],
    *,
    rules: ReadingRules,
    started: float,
    generation: int = 0,
) -> Job:
    """Put both tokenizers into the dataset and return what the workers need to know."""
    options = opened.options
    run_folder = run_folder_of(options.output, configuration)
    stored = []
    for side, tokenizer in zip(("student", "teacher"), opened.tokenizers, strict=True):
        path = storage.join(options.output, "tokenizers", side, tokenizer.file_name)
        stored.append(store_tokenizer(tokenizer, path, scratch=run_folder))
    return Job(
        output=options.output,
        run_folder=run_folder,
        name=options.name,
        rules=rules,
        overlap=_read_overlap(options),
        num_buckets=configuration["num_buckets"],
        shard_bytes=options.shard_bytes,
        keep_text=configuration["keep_text"],
        shuffle=choose_shuffle(options),
        student=stored[0],
        teacher=stored[1],
        tokenizer_records=tokenizer_records(options, opened.tokenizers),
        configuration=configuration,
        attempt=uuid.uuid4().hex,
        started=started,
        generation=generation,
    )


def tokenizer_records(
    options: AlignOptions, tokenizers: tuple[Tokenizer, Tokenizer]
) -> tuple[TokenizerRecord, TokenizerRecord]:
    """Return what the manifest says of both tokenizers.

    Raises:
        TokenizerError: an option names a token that isn't there.
    """
    student, teacher = tokenizers
    return (
        describe_tokenizer(
            student, "tokenizers/student", before=options.student_bos, after=options.student_eos
        ),
        # Rows end a teacher's text with nothing.
        describe_tokenizer(
            teacher, "tokenizers/teacher", before=options.teacher_context, after=NOTHING
        ),
    )


def run_job(
    build: Callable[[beam.Pipeline], None],
    run_folder: str,
    beam_options: PipelineOptions,
    *,
    run: RunOptions,
    text_bytes: int,
    disk_bytes: int,
) -> None:
    """Run a pipeline to its end, with a live bar where the run's folder is local.

    Raises:
        JobError: with the cause, and where the traceback is.
    """
    reset_progress(run_folder)
    pipeline = beam.Pipeline(runner=make_runner(beam_options), options=beam_options)
    build(pipeline)
    bar = partial(run_with_bar, run_folder, text_bytes=text_bytes, quiet=run.quiet)
    run_to_end(pipeline, run_folder, run=run, with_bar=bar, disk_bytes=disk_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, see `exit_status`."""

    def work() -> None:
        options = parse_options(arguments)
        configure_logging("align", options.run)
        if options.dry_run:
            print(describe(options))
        else:
            align(options)

    return exit_status("align", work)


def _settle(options: AlignOptions) -> tuple[AlignOptions, PipelineOptions]:
    """Return the options with a full path of the output, and Beam's, once both can be used."""
    beam_options = make_beam_options(options.beam_arguments, run=options.run, own=own_options())
    files = [place for place in options.input if place != STANDARD_INPUT]
    require_cluster(beam_options, {"--input": files, "--output": [options.output]})
    FileSystems.set_options(beam_options)
    return replace(options, output=storage.absolute(options.output)), beam_options


def _find_finished(opened: OpenedInput, configuration: Mapping[str, Any]) -> Manifest | None:
    """Return the dataset if nothing is left to do, and say so."""
    options = opened.options
    manifest = _find_made(options, configuration)
    summary = storage.join(run_folder_of(options.output, configuration), SUMMARY_FILE)
    if manifest is None or storage.num_bytes_of(summary) is not None:
        return None
    remark = require_same_inputs(options.output, opened.files)
    options.run.say(
        f"{options.output} is finished: the same input and options made it; nothing to do"
        + (f"\nnote: {remark}" if remark else "")
    )
    _require_few_losses(manifest, read_losses(options.output, manifest), options)
    return manifest


def _find_made(options: AlignOptions, configuration: Mapping[str, Any]) -> Manifest | None:
    """Return what the same input and options have made: a dataset, or its newest generation."""
    find = find_appended if options.append else find_finished
    return find(options.output, configuration)


def _make(
    opened: OpenedInput,
    beam_options: PipelineOptions,
    configuration: dict[str, Any],
    *,
    started: float,
    clock: float,
) -> Manifest:
    """Make the dataset, or what an attempt that died last has left to do."""
    options = opened.options
    run_folder = run_folder_of(options.output, configuration)
    manifest = _find_made(options, configuration)
    seconds = None
    if manifest is None:
        manifest = _run(opened, beam_options, configuration, started=started)
        if options.append and manifest.configuration != configuration:
            return manifest  # nothing new
        seconds = time.monotonic() - clock  # the other clock may have been set back meanwhile
    losses = read_losses(options.output, manifest)
    run = _describe_run(
        run_folder, configuration, beam_options, manifest, opened.tokenizers, losses
    )
    run = run if seconds is None else replace(run, elapsed_seconds=seconds)
    report = write_report(manifest, run, output=options.output, scratch=run_folder)
    publish_inputs(run_folder, options.output)
    close_run(options.output, run_folder, manifest)
    options.run.say(summarise(manifest, run, output=options.output, report=report))
    _require_few_losses(manifest, losses, options)
    return manifest


def _run(
    opened: OpenedInput,
    beam_options: PipelineOptions,
    configuration: dict[str, Any],
    *,
    started: float,
) -> Manifest:
    """Run the job to its end, and return what it made."""
    options, tokenizers = opened.options, opened.tokenizers
    output, run_folder = options.output, run_folder_of(options.output, configuration)
    before = read_newest(output) if options.append else None
    tasks = plan_tasks(opened.files)
    probes = probe_documents(tasks, options.rules)
    if before is None:
        rules = settle_metadata(options.rules, probes)
        warn_of_lost_files(output)
    else:
        rules = rules_of(before, options.rules)
    for tokenizer in tokenizers:
        tokenizer.check_fast_path(usable_texts(probes))
    text_bytes = _text_bytes(opened.files)
    keep_text = configuration["keep_text"]
    disk = estimate_disk(text_bytes, keep_text=keep_text, shuffle=choose_shuffle(options))
    disk += sum(len(tokenizer.file_bytes) for tokenizer in tokenizers)
    require_disk(output, run_folder, disk)
    open_run(run_folder, configuration)
    path = storage.join(run_folder, INPUTS_FILE)
    storage.write_atomically(path, encode_inputs(opened.files), scratch=run_folder)
    run = partial(
        run_job,
        run_folder=run_folder,
        beam_options=beam_options,
        run=options.run,
        text_bytes=text_bytes,
        disk_bytes=disk,
    )
    if opened.dataset is not None:
        _count_lost_texts(opened, tasks, rules, run_folder, run)
    generation = 0
    if before is not None:
        generation = before.generation + 1
        keep_manifest(output, before, scratch=run_folder)
        tasks = [*plan_taken_ids(before, output), *tasks]
    job = prepare_job(opened, configuration, rules=rules, started=started, generation=generation)
    run(lambda pipeline: build_pipeline(pipeline, tasks, job))
    return _read_result(job, options)


def _count_lost_texts(
    opened: OpenedInput,
    tasks: Sequence[str],
    rules: ReadingRules,
    run_folder: str,
    run: Callable[[Callable[[beam.Pipeline], None]], None],
) -> None:
    """Count and name the documents of a dataset whose texts can't be had, before any is aligned.

    Raises:
        LostTextsError: they are more than may be left out; nothing of the output is there.
    """
    options, dataset = opened.options, opened.dataset
    assert dataset is not None
    if dataset.keeps_text:
        return
    lost = read_lost_texts(run_folder)  # an earlier attempt has counted them
    if lost is None:
        run(lambda pipeline: count_lost_texts(pipeline, tasks, rules, run_folder))
        lost = read_lost_texts(run_folder)
        assert lost is not None
    if lost.count > options.max_dead_letters * dataset.num_documents:
        storage.remove_folder(run_folder)
        raise LostTextsError(describe_lost_texts(lost, dataset))
    if lost.count:
        options.run.say(f"note: {describe_lost_texts(lost, dataset)}")


def _read_overlap(options: AlignOptions) -> dict[str, str]:
    return read_overlap(options.exclude_overlap) if options.exclude_overlap else {}


def _excluded(options: AlignOptions) -> dict[str, str]:
    """Return what identifies the list; datasets made without one keep their configuration."""
    overlap = _read_overlap(options)
    return {"overlap_sha256": digest_of_overlap(overlap)} if options.exclude_overlap else {}


def _require_few_losses(manifest: Manifest, losses: Losses, options: AlignOptions) -> None:
    require_few_losses(manifest, losses, max_share=options.max_dead_letters, output=options.output)


def _text_bytes(files: Sequence[InputFile]) -> int:
    return round(sum(file.estimated_text_bytes for file in files))


def _read_result(job: Job, options: AlignOptions) -> Manifest:
    """Return what the job made, or the dataset as it was where every document was known."""
    if storage.num_bytes_of(storage.join(job.output, MANIFEST_FILE)) is not None:
        manifest = read_manifest(job.output)
        if manifest.generation == job.generation:
            return manifest
        letters = storage.join(job.output, job.dead_letters_file)
        if storage.num_bytes_of(letters):
            storage.remove_folder(job.run_folder)
            _require_known(letters, manifest, options)
            return manifest
    storage.remove_folder(job.run_folder)
    raise InputError("the input holds no document: every file is empty or blank")


def _require_known(letters: str, manifest: Manifest, options: AlignOptions) -> None:
    """Check that an input without a new document is one of known ids, and say so."""
    by_reason = count_reasons(letters)
    lost, num_documents = count_lost(by_reason), by_reason.total()
    told = f"the dataset stays at generation {manifest.generation}; {letters} lists each document"
    if lost.total() > options.max_dead_letters * num_documents or lost == by_reason:
        raise InputError(f"no document of the input is new and can be used: {told} and the reason")
    options.run.say(
        f"nothing new: {options.output} has the ids of "
        f"{format_plural(by_reason[Reason.KNOWN_ID], 'document')} of "
        f"{format_count(num_documents)} already; {told}"
    )


def _chosen_conventions(
    options: AlignOptions, tokenizers: tuple[Tokenizer, Tokenizer]
) -> dict[str, Any]:
    """Return the conventions that are not the tokenizers' own; a dataset keeps the ones it has."""
    plain = replace(options, student_bos=None, student_eos=None, teacher_context=None)
    own, chosen = (tokenizer_records(o, tokenizers) for o in (plain, options))
    pairs = zip(("student", "teacher"), own, chosen, strict=True)
    return {f"{side}_convention": asdict(b.around_text) for side, a, b in pairs if a != b}


def _describe_run(
    run_folder: str,
    configuration: Mapping[str, Any],
    beam_options: PipelineOptions,
    manifest: Manifest,
    tokenizers: tuple[Tokenizer, Tokenizer],
    losses: Losses,
) -> RunSummary:
    student, teacher = tokenizers
    return RunSummary(
        runner=describe_runner(beam_options),
        input_bytes=configuration["input_bytes"],
        num_input_files=configuration["input_files"],
        student_fast_path=student.fast,
        teacher_fast_path=teacher.fast,
        student_slow_reason=student.slow_reason,
        teacher_slow_reason=teacher.slow_reason,
        student_convention=describe_convention(manifest.student, student),
        teacher_convention=describe_convention(manifest.teacher, teacher),
        versions=library_versions(),
        losses=losses,
        **read_summary(storage.join(run_folder, SUMMARY_FILE)),
    )
