"""Make a dataset, or finish an earlier attempt."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import apache_beam as beam

from beam_jobs import storage
from beam_jobs.align.configuration import Attempt, tokenizer_records
from beam_jobs.align.inputs.documents import MetadataField, ReadingRules, Reason
from beam_jobs.align.inputs.input_identity import INPUTS_FILE, encode_inputs, publish_inputs
from beam_jobs.align.inputs.parts import plan_tasks
from beam_jobs.align.inputs.probes import require_fields, require_names, settle_metadata
from beam_jobs.align.inputs.sampling import FIRST_LOOK, sample_input
from beam_jobs.align.inputs.taken_ids import plan_taken_ids
from beam_jobs.align.job import Job, choose_shuffle, estimate_disk
from beam_jobs.align.options import SIDES
from beam_jobs.align.steps import (
    build_pipeline,
    count_lost_texts,
    describe_lost_texts,
    read_lost_texts,
)
from beam_jobs.generations import keep_manifest, read_newest
from beam_jobs.job_errors import InputError, TooManyDeadLettersError
from beam_jobs.left_out import (
    count_lost,
    count_reasons,
    describe_reasons,
    require_all_read,
    require_few_left_out,
)
from beam_jobs.report.page import RunSummary, SideSummary
from beam_jobs.report.run_summary import library_versions, summarise, write_report
from beam_jobs.resuming import SUMMARY_FILE, close_run, read_left_file, start_run
from beam_jobs.running.job_progress import aligning_stage
from beam_jobs.running.runners import describe_runner, run_pipeline
from beam_jobs.shortages import require_disk
from beam_jobs.tokenizer_files import store_tokenizer
from pipeline.command_line.pasted import pasted
from pipeline.dataset.conventions import describe_convention
from pipeline.dataset.dataset_reading import read_manifest
from pipeline.dataset.files import Dataset
from pipeline.distributions.pair import FEW_TOKENS, look_at_pair
from pipeline.drawing.formatting import format_count, format_plural
from schemas.manifest import MANIFEST_FILE, Manifest


def make_dataset(attempt: Attempt) -> Manifest:
    """Make or finish a dataset; errors as in `align`.

    Unless nothing is left, it is written before TooManyDeadLettersError.
    """
    output, options, run_folder = attempt.output, attempt.options, attempt.run_folder
    manifest, began = attempt.find_made(), attempt.started
    if manifest is None:
        manifest, began = _run(attempt)
        if options.append and manifest.configuration != attempt.configuration:
            return manifest  # nothing new
    run = _describe_run(attempt, manifest, began)
    options.run.say(summarise(manifest, run, output=output))  # charts take seconds
    report = write_report(manifest, run, output=output, scratch=run_folder)
    publish_inputs(run_folder, output)
    close_run(output, run_folder, manifest)
    options.run.say(f"report: {report}\nnext:   vocag validate {pasted(output)}")
    require_few_left_out(manifest, max_share=options.max_dead_letters, output=output)
    return manifest


def run_job(attempt: Attempt, build: Callable[[beam.Pipeline], None], *, disk_bytes: int) -> None:
    """Run one of an attempt's pipelines, see `run_pipeline`."""
    run, stage = attempt.options.run, partial(aligning_stage, text_bytes=attempt.opened.text_bytes)
    place = attempt.beam_options, attempt.run_folder
    run_pipeline(build, *place, run=run, stage=stage, disk_bytes=disk_bytes)


def _run(attempt: Attempt) -> tuple[Manifest, float]:
    """Return the manifest, and when work on documents began."""
    opened, options, output = attempt.opened, attempt.options, attempt.output
    run_folder = attempt.run_folder
    before = read_newest(output) if options.append else None
    tasks = plan_tasks(opened.files)
    sample = sample_input(opened.files, opened.rules, FIRST_LOOK)
    require_fields(sample, opened.rules)
    if before is None:
        rules = settle_metadata(opened.rules, sample)
    else:
        require_names(sample)
        columns = tuple(MetadataField(each.name, each.type) for each in before.metadata)
        rules = replace(opened.rules, metadata=columns)
    opened.check_fast_paths(sample)
    shuffle, keep_text = choose_shuffle(options), bool(options.keep_text)
    disk = estimate_disk(opened.text_bytes, keep_text=keep_text, shuffle=shuffle)
    disk += sum(len(tokenizer.file_bytes) for tokenizer in opened.tokenizers)
    require_disk(output, disk, earlier=run_folder)
    start_run(run_folder, attempt.configuration)
    path = storage.join(run_folder, INPUTS_FILE)
    storage.write_atomically(path, encode_inputs(opened.files), scratch=run_folder)
    _count_lost_texts(attempt, tasks, rules, disk_bytes=disk)
    generation = 0
    if before is not None:
        generation = before.generation + 1
        keep_manifest(output, before, scratch=run_folder)
        tasks = [*plan_taken_ids(before, output), *tasks]
    job = _make_job(attempt, rules, generation)
    began = time.monotonic()
    run_job(attempt, partial(build_pipeline, tasks=tasks, job=job), disk_bytes=disk)
    return _read_result(attempt, job), began


def _count_lost_texts(
    attempt: Attempt, tasks: Sequence[str], rules: ReadingRules, *, disk_bytes: int
) -> None:
    options, dataset, run_folder = attempt.options, attempt.opened.dataset, attempt.run_folder
    if dataset is None or dataset.keeps_text:
        return
    lost = read_lost_texts(run_folder)  # an earlier attempt has counted them
    if lost is None:
        count = partial(count_lost_texts, tasks=tasks, rules=rules, run_folder=run_folder)
        run_job(attempt, count, disk_bytes=disk_bytes)
        lost = read_lost_texts(run_folder)
        assert lost is not None
    if lost.count > options.max_dead_letters * dataset.num_documents:
        storage.remove_folder(run_folder)
        raise InputError(describe_lost_texts(lost, dataset))
    if lost.count:
        options.run.say(f"note: {describe_lost_texts(lost, dataset)}")


def _make_job(attempt: Attempt, rules: ReadingRules, generation: int) -> Job:
    options, tokenizers, output = attempt.options, attempt.opened.tokenizers, attempt.output
    stored = []
    for side, tokenizer in zip(("student", "teacher"), tokenizers, strict=True):
        path = storage.join(output, "tokenizers", side, tokenizer.file_name)
        stored.append(store_tokenizer(tokenizer, path, scratch=attempt.run_folder))
    chats = attempt.opened.chats
    for side, template in zip(SIDES, () if chats is None else chats.templates, strict=False):
        path = storage.join(output, "templates", f"{side}.jinja")
        storage.make_folder(storage.join(output, "templates"))
        storage.write_atomically(path, template.text.encode(), scratch=attempt.run_folder)
    return Job(
        output=output,
        run_folder=attempt.run_folder,
        name=options.name,
        rules=rules,
        num_buckets=attempt.configuration["num_buckets"],
        shard_bytes=options.shard_bytes,
        keep_text=bool(options.keep_text),
        shuffle=choose_shuffle(options),
        student=stored[0],
        teacher=stored[1],
        tokenizer_records=tokenizer_records(options, tokenizers),
        configuration=attempt.configuration,
        attempt=uuid.uuid4().hex,
        generation=generation,
        chats=chats,
    )


def _read_result(attempt: Attempt, job: Job) -> Manifest:
    """The new manifest, or the old one if every id was known."""
    manifest = None
    if storage.num_bytes_of(storage.join(job.output, MANIFEST_FILE)) is not None:
        manifest = read_manifest(job.output)
        if manifest.generation == job.generation:
            return manifest
    storage.remove_folder(job.run_folder)
    letters = storage.join(job.output, job.dead_letters_file)
    if not storage.num_bytes_of(letters):
        raise InputError("the input holds no document: every file is empty or blank")
    if manifest is None:
        raise TooManyDeadLettersError(
            f"no document can be used, so no dataset is made: {describe_reasons(letters)}; "
            f"{letters} names each"
        )
    _require_known(attempt, letters, manifest)
    return manifest


def _require_known(attempt: Attempt, letters: str, manifest: Manifest) -> None:
    by_reason = count_reasons(letters)
    require_all_read(letters, max_share=attempt.options.max_dead_letters)
    lost, num_documents = count_lost(by_reason), by_reason.total()
    told = f"the dataset stays at generation {manifest.generation}; {letters} lists each document"
    if lost.total() > attempt.options.max_dead_letters * num_documents or lost == by_reason:
        raise InputError(f"no document of the input is both new and usable: {told} and the reason")
    attempt.options.run.say(
        f"nothing new: {attempt.output} has the ids of "
        f"{format_plural(by_reason[Reason.KNOWN_ID], 'document')} of "
        f"{format_count(num_documents)} already; {told}"
    )


def _describe_run(attempt: Attempt, manifest: Manifest, began: float) -> RunSummary:
    told = read_left_file(storage.join(attempt.run_folder, SUMMARY_FILE))
    sides = {
        side: SideSummary(
            convention=describe_convention(getattr(manifest, side), tokenizer),
            slow_reason=None if tokenizer.fast else tokenizer.slow_reason or "asked for",
        )
        for side, tokenizer in zip(("student", "teacher"), attempt.opened.tokenizers, strict=True)
    }
    return RunSummary(
        runner=describe_runner(attempt.beam_options),
        elapsed_seconds=time.monotonic() - attempt.started,
        start_up_seconds=began - attempt.started,
        input_bytes=attempt.configuration["input_bytes"],
        num_input_files=attempt.configuration["input_files"],
        **sides,
        max_dead_letters=attempt.options.max_dead_letters,
        reused_buckets=told["reused_buckets"],
        control_strings=told.get("control_strings", {}),  # an earlier release didn't count them
        versions=library_versions(),
        pair=_describe_pair(Dataset(attempt.output, manifest)),
    )


def _describe_pair(dataset: Dataset) -> str:
    if dataset.manifest.student.sha256 == dataset.manifest.teacher.sha256:
        return ""
    try:
        return look_at_pair(dataset, num_tokens=FEW_TOKENS).describe()
    except ValueError as error:  # words without bytes, or no byte that both know
        return f"no distributions: {error}"
