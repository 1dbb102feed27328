"""`--dry-run`: what a job would do, told from a sample of its input; nothing is written."""

import io
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from beam_jobs import storage
from beam_jobs.align.options import AlignOptions
from beam_jobs.align.pieces import InputFile
from beam_jobs.align.probes import Outcome, probe_documents, settle_metadata, usable_texts
from beam_jobs.align.reading import DeadLetter, PlacedDocument
from beam_jobs.align.resources import choose_shuffle, estimate_memory
from beam_jobs.shortages import free_bytes
from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.dataset.writing import ShardWriter
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_share,
    format_short,
)
from pipeline.tokenization import Tokenizer

SAMPLE_DOCUMENTS = 500
SAMPLE_BYTES = 1 << 20
SHOWN_LETTERS = 5


@dataclass(frozen=True)
class Sample:
    """What a few documents gave: sums over the usable ones."""

    num_text_bytes: int
    num_student_tokens: int
    num_teacher_tokens: int
    num_shard_bytes: int
    seconds: float


def describe_job(
    options: AlignOptions,
    files: Sequence[InputFile],
    tasks: Sequence[str],
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> str:
    """Return what the job would read, write, take and leave out, in lines.

    Raises:
        InputError: none of the sampled documents has the text field, or the id field asked for.
    """
    outcomes = probe_documents(
        tasks, options.rules, num_documents=SAMPLE_DOCUMENTS, num_bytes=SAMPLE_BYTES
    )
    columns = settle_metadata(options.rules, outcomes).metadata
    texts = usable_texts(outcomes)
    for tokenizer in tokenizers:
        tokenizer.check_fast_path(texts)
    sample = measure_sample(outcomes, tokenizers, keep_text=bool(options.keep_text))
    text_bytes = sum(file.estimated_text_bytes for file in files)
    lines = [
        "dry run: nothing was written",
        f"  input           {_describe_files(files)}; about {format_bytes(text_bytes)} of text",
        f"  sample          {format_plural(len(texts), 'document')}, "
        f"{format_bytes(sample.num_text_bytes)} of text",
    ]
    if sample.num_student_tokens:
        lines += _describe_tokens(sample, tokenizers, text_bytes)
        lines += _describe_needs(options, sample, text_bytes, tokenizers)
    if columns:
        told = ", ".join(f"{column.name} {column.type}" for column in columns)
        lines.append(f"  metadata        {told}")
    return "\n".join(lines + _describe_letters(outcomes))


def measure_sample(
    outcomes: Sequence[Outcome], tokenizers: tuple[Tokenizer, Tokenizer], *, keep_text: bool
) -> Sample:
    """Align and encode a sample as the job would."""
    documents = [
        SourceDocument(outcome.document_id, outcome.text)
        for outcome in outcomes
        if isinstance(outcome, PlacedDocument)
    ]
    align_batch(documents[:8], *tokenizers)  # kernels are compiled and loaded meanwhile
    for tokenizer in tokenizers:
        tokenizer.num_reference_documents = 0
    started = time.perf_counter()
    batch = align_batch(documents, *tokenizers)
    writer = ShardWriter(io.BytesIO(), keep_text=keep_text)
    writer.add(batch)
    num_shard_bytes = writer.close().num_bytes if batch.documents else 0
    return Sample(
        num_text_bytes=sum(len(document.text) for document in batch.documents),
        num_student_tokens=int(batch.student.cu_tokens[-1]),
        num_teacher_tokens=int(batch.teacher.cu_tokens[-1]),
        num_shard_bytes=num_shard_bytes,
        seconds=time.perf_counter() - started,
    )


def _describe_files(files: Sequence[InputFile]) -> str:
    kinds = Counter(
        file.format if file.compression == "none" else f"{file.format} {file.compression}"
        for file in files
    )
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    num_bytes = sum(file.num_bytes for file in files)
    return f"{format_plural(len(files), 'file')} ({listed}), {format_bytes(num_bytes)}"


def _describe_tokens(
    sample: Sample, tokenizers: tuple[Tokenizer, Tokenizer], text_bytes: float
) -> list[str]:
    student, teacher = map(_describe_path, tokenizers)
    scale = text_bytes / sample.num_text_bytes
    return [
        f"  student         {student}; about {format_short(sample.num_student_tokens * scale)} "
        f"tokens of {sample.num_text_bytes / sample.num_student_tokens:.2f} bytes",
        f"  teacher         {teacher}; "
        f"{sample.num_teacher_tokens / sample.num_student_tokens:.2f} tokens a student token",
    ]


def _describe_path(tokenizer: Tokenizer) -> str:
    if not tokenizer.fast:
        return f"reference path ({tokenizer.slow_reason or 'asked for'})"
    slow = tokenizer.num_reference_documents
    return f"fast path{f', {slow} of the documents by the reference' if slow else ''}"


def _describe_needs(
    options: AlignOptions,
    sample: Sample,
    text_bytes: float,
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> list[str]:
    scale = text_bytes / sample.num_text_bytes
    shards = sample.num_shard_bytes * scale
    on_their_way = text_bytes if choose_shuffle(options) == "files" else 0
    disk = shards + on_their_way + sum(len(tokenizer.file_bytes) for tokenizer in tokenizers)
    free = ""
    if storage.is_local(options.output):
        free = f"; {format_bytes(free_bytes(options.output))} are free at {options.output}"
    workers = options.run.workers
    memory = estimate_memory(options.shard_bytes, keep_text=bool(options.keep_text))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"  dataset         about {format_bytes(shards)}, "
        f"{sample.num_shard_bytes / sample.num_student_tokens:.2f} bytes a student token",
        f"  disk            about {format_bytes(disk)} while it runs{free}",
        f"  memory          about {format_bytes(memory)} a process, {workers} of them; "
        f"this machine has {format_bytes(whole)}",
        f"  time            about {format_duration(sample.seconds * scale / workers)} of aligning "
        "here, besides reading and a start of seconds",
    ]


def _describe_letters(outcomes: Sequence[Outcome]) -> list[str]:
    letters = [outcome for outcome in outcomes if isinstance(outcome, DeadLetter)]
    lines = [
        f"  dead letters    {format_count(len(letters))} of the first {format_count(len(outcomes))}"
        f" documents ({format_share(len(letters), len(outcomes))}); doubled ids don't show here"
    ]
    lines += [
        f"    {letter.source}#{letter.position}: {letter.reason}: {letter.detail}"
        for letter in letters[:SHOWN_LETTERS]
    ]
    return lines
