"""`--dry-run`: estimate a job from a sample; nothing is written."""

import io
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import msgspec

from beam_jobs.align.bucket_blocks import estimate_bytes
from beam_jobs.align.inputs import sampling
from beam_jobs.align.inputs.documents import DeadLetter, PlacedDocument, ReadingRules, Reason
from beam_jobs.align.inputs.parts import InputFile
from beam_jobs.align.inputs.probes import require_fields, settle_metadata
from beam_jobs.align.inputs.sampling import (
    HEAD_LETTERS,
    SampledPart,
    look_at_heads,
    sample_input,
)
from beam_jobs.align.inputs.unusable import describe_unusable, may_be_unusable
from beam_jobs.align.job import choose_shuffle, estimate_memory
from beam_jobs.align.job_chats import align_documents
from beam_jobs.align.opened_input import OpenedInput
from beam_jobs.job_errors import TooManyDeadLettersError
from beam_jobs.left_out import describe_place
from beam_jobs.shortages import describe_room
from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.dataset.chosen_documents import why_nothing
from pipeline.dataset.writing import END_OF_TAR, ShardWriter
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_share,
    format_short,
)
from pipeline.tokenization import Tokenizer
from pipeline.tokenization.pieces import start_of
from schemas.index import encode_index

SHOWN_LETTERS = 5
MEASURED_BYTES = 1 << 20
"""Of a longer document only the start is aligned."""


@dataclass(frozen=True)
class Volume:
    """Amounts in the sample or the whole input."""

    num_documents: float = 0
    num_text_bytes: float = 0
    num_student_tokens: float = 0
    num_teacher_tokens: float = 0
    num_tar_bytes: float = 0
    num_block_bytes: float = 0
    num_learned: float = 0
    seconds: float = 0
    core_seconds: float = 0

    def plus(self, other: "Volume", *, times: float) -> "Volume":
        """Return self + times * other."""
        names = [entry.name for entry in fields(self)]
        return Volume(*(getattr(self, name) + times * getattr(other, name) for name in names))


def describe_job(opened: OpenedInput) -> tuple[str, str]:
    """Describe a job, and why it would end with status 3, if so.

    InputError if no sampled document has the required fields, TooManyDeadLettersError if none is
    usable.
    """
    files, tokenizers = opened.files, opened.tokenizers
    sample = sample_input(files, opened.rules, sampling.ESTIMATE)
    heads = _look_at_others(files, sample, opened.rules)
    require_fields(sample, opened.rules)
    columns = settle_metadata(opened.rules, sample).metadata
    documents = [document for part in sample for document in part.documents]
    letters = _describe_letters(sample) + heads.lines
    if not documents:
        error = TooManyDeadLettersError(
            "--dry-run can't estimate tokens, disk, memory or time: no document could be used in "
            f"the {format_plural(len(sample), 'place')} of {_describe_files(files)} where it looked"
        )
        for line in letters:
            error.add_note(line)
        raise error
    opened.check_fast_paths(sample)
    whole, num_sampled_bytes, shards = estimate_volume(sample, opened)
    lines = [
        "dry run: nothing was written",
        f"  input           {_describe_files(files)}; about {format_bytes(whole.num_text_bytes)} "
        f"of text in {format_plural(round(whole.num_documents), 'document')}",
        f"  sample          {format_plural(len(documents), 'document')} of "
        f"{format_plural(len(sample), 'place')}, {format_bytes(num_sampled_bytes)} of text",
        *_describe_tokens(whole, tokenizers),
        *_describe_learned(opened, whole),
        *_describe_needs(opened, whole, shards),
    ]
    if columns:
        told = ", ".join(f"{column.name} {column.type}" for column in columns)
        lines.append(f"  metadata        {told}")
    return "\n".join(lines + letters), _describe_loss(sample, heads, opened)


def estimate_volume(
    sample: Sequence[SampledPart], opened: OpenedInput
) -> tuple[Volume, float, float]:
    """Align and encode a sample as the job would.

    Return the whole input's volume, and the bytes of sampled text and of tars with indices.
    """
    tokenizers, keep_text = opened.tokenizers, bool(opened.options.keep_text)
    documents = [document for part in sample for document in part.documents]
    _align(_starts(documents[:8], opened), opened)  # loads kernels
    for tokenizer in tokenizers:
        tokenizer.num_reference_documents = 0
    whole = sampled = Volume()
    num_documents: float = sum(file.format == "text" for file in opened.files)  # a document each
    writer = ShardWriter(io.BytesIO(), keep_text=keep_text)
    for part in sample:
        volume, num_bytes = _measure(part, opened, writer)
        if volume.num_text_bytes:
            sampled = sampled.plus(volume, times=1)
            cut, scale = num_bytes / volume.num_text_bytes, part.measure_scale()
            whole = whole.plus(volume, times=scale * cut)
            if part.part.file.format != "text":
                num_documents += len(part.documents) * scale
    whole = replace(whole, num_documents=num_documents)
    index = len(encode_index(writer.close().index))
    empty = len(encode_index(ShardWriter(io.BytesIO()).close().index))
    shards = min(float(opened.num_buckets), whole.num_documents) * (len(END_OF_TAR) + empty)
    of_tars = 1 + (index - empty) / max(1, sampled.num_tar_bytes)
    return whole, sampled.num_text_bytes, shards + whole.num_tar_bytes * of_tars


def _measure(part: SampledPart, opened: OpenedInput, writer: ShardWriter) -> tuple[Volume, int]:
    """A sample's volume with long documents cut, and its text bytes uncut."""
    documents = _starts(part.documents, opened)
    started, cores, before = time.perf_counter(), time.process_time(), writer.num_bytes
    batch = _align(documents, opened)
    writer.add(batch)
    volume = Volume(
        num_text_bytes=sum(len(document.text) for document in batch.documents),
        num_student_tokens=int(batch.student.cu_tokens[-1]),
        num_teacher_tokens=int(batch.teacher.cu_tokens[-1]),
        num_tar_bytes=writer.num_bytes - before,
        num_block_bytes=sum(map(estimate_bytes, documents)),
        num_learned=0 if batch.chats is None else len(batch.chats.student.learned.values),
        seconds=time.perf_counter() - started,
        core_seconds=time.process_time() - cores,
    )
    if opened.chats is not None:  # whole, and as JSON longer than their texts
        return volume, int(volume.num_text_bytes)
    return volume, sum(len(document.text) for document in part.documents)


def _starts(documents: Iterable[PlacedDocument], opened: OpenedInput) -> list[PlacedDocument]:
    if opened.chats is not None:
        return [*documents]
    replace_text = msgspec.structs.replace
    return [replace_text(each, text=start_of(each.text, MEASURED_BYTES)) for each in documents]


def _align(documents: Iterable[PlacedDocument], opened: OpenedInput) -> AlignedBatch:
    given = [SourceDocument(d.document_id, d.text) for d in documents]
    return align_documents(given, opened.tokenizers, opened.chats)


def _describe_files(files: Sequence[InputFile]) -> str:
    kinds = Counter(
        file.format if file.compression == "none" else f"{file.format} {file.compression}"
        for file in files
    )
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    num_bytes = sum(file.num_bytes for file in files)
    return f"{format_plural(len(files), 'file')} ({listed}), {format_bytes(num_bytes)}"


def _describe_tokens(whole: Volume, tokenizers: tuple[Tokenizer, Tokenizer]) -> list[str]:
    student, teacher = map(_describe_path, tokenizers)
    return [
        f"  student         {student}; about {format_short(whole.num_student_tokens)} "
        f"tokens of {whole.num_text_bytes / whole.num_student_tokens:.2f} bytes",
        f"  teacher         {teacher}; about {format_short(whole.num_teacher_tokens)} tokens; "
        f"{whole.num_teacher_tokens / whole.num_student_tokens:.2f} tokens a student token",
    ]


def _describe_learned(opened: OpenedInput, whole: Volume) -> list[str]:
    if opened.chats is None or whole.num_learned:
        return []
    why = why_nothing(opened.chats.rule.learn)
    return [f"  learned         nothing of the sample; can't be trained on: {why}"]


def _describe_path(tokenizer: Tokenizer) -> str:
    if not tokenizer.fast:
        return f"reference path ({tokenizer.slow_reason or 'asked for'})"
    slow = tokenizer.num_reference_documents
    return f"fast path{f', {slow} of the documents by the reference' if slow else ''}"


def _describe_needs(opened: OpenedInput, whole: Volume, shards: float) -> list[str]:
    options, tokenizers = opened.options, opened.tokenizers
    on_their_way = whole.num_block_bytes if choose_shuffle(options) == "files" else 0
    disk = shards + on_their_way + sum(len(tokenizer.file_bytes) for tokenizer in tokenizers)
    workers = options.run.workers
    memory, most = (
        estimate_memory(
            options.shard_bytes, keep_text=bool(options.keep_text), longest_document=longest
        )
        for longest in (0, options.max_document_bytes)
    )
    num_shards = max(1, round(min(opened.num_buckets, whole.num_documents)))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"  dataset         about {format_bytes(shards)} in {format_plural(num_shards, 'shard')}, "
        f"{shards / whole.num_student_tokens:.2f} bytes a student token",
        f"  disk            about {format_bytes(disk)} while it runs"
        f"{describe_room(options.output, disk)}",
        f"  memory          about {format_bytes(memory)} a process, {workers} of them, and "
        f"{format_bytes(most - memory)} more for a document as long as --max-document-bytes "
        f"allows ({format_bytes(options.max_document_bytes)}); this machine has "
        f"{format_bytes(machine)}",
        f"  time            about {format_duration(whole.seconds / workers)} of aligning here "
        f"({whole.core_seconds / 3600:.2g} core hours), besides reading and a start of seconds",
    ]


def _letters_of(sample: Sequence[SampledPart]) -> list[DeadLetter]:
    return [
        # Lines of a part within a file are counted from the part's start.
        msgspec.structs.replace(outcome, line=None) if part.part.start else outcome
        for part in sample
        for outcome in part.outcomes
        if isinstance(outcome, DeadLetter)
    ]


@dataclass(frozen=True)
class _Heads:
    lines: list[str]
    unreadable: list[str]
    unusable: list[str]


def _look_at_others(
    files: Sequence[InputFile], sample: Sequence[SampledPart], rules: ReadingRules
) -> _Heads:
    """Look at heads of files without a sampled document.

    Not text files: each is one document, so shares count it.
    """
    usable = {part.part.file.source for part in sample if part.documents}
    others = [f for f in files if f.source not in usable and may_be_unusable(f)]
    heads = look_at_heads(others, rules)
    sampled = {part.part.file.source for part in sample}
    num_passed = sum(f.source not in sampled and f.format == "text" for f in files)
    told = f"  not looked at   {format_plural(num_passed, 'text file')}, a document each"
    lines = [told] if num_passed else []
    unreadable, unusable = [], []
    for source, letters in heads.items():
        if any(letter.reason == Reason.UNREADABLE_INPUT for letter in letters):
            unreadable.append(source)
        else:
            unusable.append(source)
        if len(unreadable) + len(unusable) <= SHOWN_LETTERS:
            of = f" of the first {HEAD_LETTERS}" if len(letters) == HEAD_LETTERS else ""
            why = describe_unusable([msgspec.structs.asdict(letter) for letter in letters], of=of)
            lines.append(f"  unusable        {source}: {why}")
    if len(heads) > SHOWN_LETTERS:
        lines.append(f"  unusable        {format_plural(len(heads), 'file')} in all")
    return _Heads(lines, unreadable, unusable)


def _describe_loss(sample: Sequence[SampledPart], heads: _Heads, opened: OpenedInput) -> str:
    num_outcomes = sum(len(part.outcomes) for part in sample)
    letters, most = _letters_of(sample), opened.options.max_dead_letters
    unread = {each.source for each in letters if each.reason == Reason.UNREADABLE_INPUT}
    unread.update(heads.unreadable)
    if unread and most < 1:
        told = f"{format_plural(len(unread), 'file')} of the input can't be read to the end"
    elif heads.unusable and most < 1:
        told = (
            f"no document of {format_plural(len(heads.unusable), 'file')} can be used, such as "
            f"{heads.unusable[0]}"
        )
    elif len(letters) > most * num_outcomes:
        told = (
            f"{format_share(len(letters), num_outcomes)} of the sampled documents are left out, "
            f"more than --max-dead-letters {100 * most:.6g} %"
        )
    else:
        return ""
    return f"{told}: the job would end with status 3"


def _describe_letters(sample: Sequence[SampledPart]) -> list[str]:
    num_outcomes, letters = sum(len(part.outcomes) for part in sample), _letters_of(sample)
    lines = [
        f"  dead letters    {format_count(len(letters))} of {format_count(num_outcomes)} sampled "
        f"documents ({format_share(len(letters), num_outcomes)}); repeated ids don't show here"
    ]
    lines += [
        f"    {describe_place(msgspec.structs.asdict(letter))}: {letter.reason}: {letter.detail}"
        for letter in letters[:SHOWN_LETTERS]
    ]
    return lines
