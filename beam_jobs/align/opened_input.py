"""A job's input, tokenizers, and options completed from a dataset."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from shlex import quote
from typing import Any

from beam_jobs import storage
from beam_jobs.align.inputs.datasets import (
    InputDataset,
    StoredDataset,
    find_dataset,
    open_dataset_as_input,
)
from beam_jobs.align.inputs.documents import ReadingRules
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.metadata import parse_metadata
from beam_jobs.align.inputs.parts import DATASET, InputFile, count_buckets
from beam_jobs.align.inputs.probes import probe_texts
from beam_jobs.align.inputs.sampling import SampledPart
from beam_jobs.align.inputs.standard_input import is_spooled
from beam_jobs.align.inputs.text_templates import parse_template
from beam_jobs.align.job_chats import JobChats, open_chats, render_first
from beam_jobs.align.options import AlignOptions
from beam_jobs.generations import read_newest
from beam_jobs.job_errors import InputError, OptionsError
from beam_jobs.tokenizer_files import load_stored
from pipeline.command_line.failures import hinted
from pipeline.command_line.option_parsing import naming_options
from pipeline.dataset.conventions import NOTHING
from pipeline.tokenization import Tokenizer, load_tokenizer
from schemas.manifest import Manifest

_OF_FILES = {"text_field": "text", "id_field": "id", "text_template": "", "metadata": ""}
"""Options about documents in files, with their defaults."""

_MAX_NAMED = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedInput:
    """What a job is made of, with all options filled in.

    `metadata` is as in the dataset's configuration; `dataset` is None for files.
    """

    options: AlignOptions
    rules: ReadingRules
    metadata: str
    files: Sequence[InputFile]
    tokenizers: tuple[Tokenizer, Tokenizer]
    dataset: InputDataset | None
    chats: JobChats | None = None

    @property
    def text_bytes(self) -> int:
        """Rough bytes of text in the input."""
        return round(sum(file.estimated_text_bytes for file in self.files))

    @property
    def num_buckets(self) -> int:
        """Number of buckets, each of about one shard."""
        options, dataset = self.options, self.dataset
        of_files = sum(file.estimated_text_bytes for file in self.files)
        text_bytes = of_files if dataset is None else dataset.assumed_text_bytes
        keep_text = bool(options.keep_text)
        return count_buckets(text_bytes, shard_bytes=options.shard_bytes, keep_text=keep_text)

    def check_fast_paths(self, sample: Sequence[SampledPart]) -> None:
        """Compare both tokenizers' paths on the first documents; errors as in `render_first`."""
        probes = probe_texts(sample)
        if self.chats is not None:
            probes = render_first((d for each in sample for d in each.documents), self.chats)
        for tokenizer in self.tokenizers:
            tokenizer.check_fast_path(probes)


def open_input(options: AlignOptions) -> OpenedInput:
    """Find the input, load both tokenizers; ValueError if one, or an option, is unusable."""
    rules = reading_rules(options)
    location = find_dataset(options.input, options.format)
    if location is None:
        return _open_files(options, rules)
    _require_none_of_files(options, location)
    _require_other_folder(location, options.output)
    with naming_options(AlignOptions):
        dataset = open_dataset_as_input(location, options.where)
    model: StoredDataset = dataset.dataset
    if model.manifest.chats is not None or options.chats.messages:
        raise InputError(
            f"--input {location}: a dataset of chats, or one read as chats, can't be aligned anew; "
            "align the files that it was made of"
        )
    if options.append:  # additions are made like the existing shards
        model = StoredDataset(options.output, read_newest(options.output))
    made = model.manifest.configuration
    options = _fill(options, made)
    names = ",".join(f"{column.name}:{column.type}" for column in model.manifest.metadata)
    files = {name: made.get(name, default) for name, default in _OF_FILES.items()}
    options = replace(options, **(files | {"metadata": names, "format": DATASET}))
    student, teacher = (_load(side, options, model) for side in ("student", "teacher"))
    options = _take_conventions(options, model.manifest, student, teacher)
    _look_at_conventions(options, student, teacher)
    metadata = str(made.get("metadata", names))
    tokenizers, rules = (student, teacher), reading_rules(options)
    return OpenedInput(options, rules, metadata, dataset.files, tokenizers, dataset)


def reading_rules(options: AlignOptions) -> ReadingRules:
    """Read the rules from options; OptionsError for an invalid template or metadata."""
    try:
        metadata = parse_metadata(options.metadata)
    except ValueError as error:
        raise OptionsError(f"--metadata {options.metadata}: {error}") from None
    try:
        if options.text_template:
            parse_template(options.text_template)
    except ValueError as error:
        raise OptionsError(f"--text-template: {error}") from None
    return ReadingRules(
        options.text_field,
        options.id_field,
        options.max_document_bytes or ReadingRules.max_document_bytes,
        options.text_template,
        metadata,
        options.chats.messages,
        options.chats.tools,
    )


def _open_files(options: AlignOptions, rules: ReadingRules) -> OpenedInput:
    if options.where:
        raise OptionsError(
            f"--where {options.where}: only documents of a dataset can be chosen, and --input "
            f"{options.input[0]} isn't one: align it with --metadata, then choose from the result"
        )
    plain = options.special_strings == "plain"
    options = _fill(options, {})
    files = find_inputs(
        options.input,
        fields=rules.text_fields,
        others=[*filter(None, [rules.id_field]), *(field.name for field in rules.metadata)],
        format=options.format,
        of_chats=bool(rules.messages_field),
    )
    _require_separate(files, options.output)
    student, teacher = (_load(side, options, None) for side in ("student", "teacher"))
    chats = None
    if options.chats.messages:
        sources = options.student, options.teacher
        chats = open_chats(options.chats, sources, (student, teacher), refuse_controls=plain)
    if chats is None:
        _look_at_conventions(options, student, teacher)
    return OpenedInput(options, rules, options.metadata, files, (student, teacher), None, chats)


def _fill(options: AlignOptions, made: Mapping[str, Any]) -> AlignOptions:
    keep_text = made.get("keep_text", False) if options.keep_text is None else options.keep_text
    if options.chats.messages:  # a template's control tokens must be read; texts render it again
        options, keep_text = replace(options, special_strings="honoured"), True
    return replace(
        options,
        max_document_bytes=options.max_document_bytes or made.get("max_document_bytes", 16 << 20),
        special_strings=options.special_strings or made.get("special_strings", "plain"),
        name=options.name or made.get("name", "corpus"),
        shard_bytes=options.shard_bytes or made.get("shard_bytes", 256 << 20),
        keep_text=keep_text,
    )


def _load(side: str, options: AlignOptions, model: StoredDataset | None) -> Tokenizer:
    source, fast = getattr(options, side), not options.no_fast_path
    strings = options.special_strings or "plain"
    if source:
        tokenizer = load_tokenizer(source, special_strings=strings, fast=fast)
    elif model is not None:
        record = getattr(model.manifest, side)
        stored = replace(model.stored_tokenizer(record), special_strings=strings, fast=fast)
        tokenizer = load_stored(replace(stored, versions=()))  # tried here: it encodes
        tokenizer.source = record.source  # not the copy, which is elsewhere in each dataset
    else:
        raise OptionsError(
            f"--{side} is not given: name the {side}'s tokenizer; only a dataset brings its own"
        )
    if tokenizer.slow_reason:
        logger.warning("%s takes the reference path: %s", tokenizer.source, tokenizer.slow_reason)
    return tokenizer


def _look_at_conventions(options: AlignOptions, student: Tokenizer, teacher: Tokenizer) -> None:
    """Refuse a tokenizer whose template is cut; warn of unknown control tokens."""
    sides = (
        (student, options.student, options.student_bos, "--student-bos"),
        (teacher, options.teacher, options.teacher_context, "--teacher-context"),
    )
    unknown: dict[str, list[str]] = {}
    for tokenizer, source, chosen, option in sides:
        if not source or chosen is not None:
            continue
        before, around = tokenizer.template_before, tokenizer.around_text
        if len(before) > 1:
            raise _cut_template(tokenizer, [tokenizer.token_name(i) for i in before], option)
        if tokenizer.control_names and around.first_token_id is around.end_token_id is None:
            names = ", ".join(tokenizer.control_names[:_MAX_NAMED])
            more = ", …" if tokenizer.control_names[_MAX_NAMED:] else ""
            told = f"{source}: {len(tokenizer.control_names)} control tokens ({names}{more})"
            unknown.setdefault(told, []).append(option)
    for told, asked in unknown.items():
        also = ["--student-eos"] if "--student-bos" in asked else []
        logger.warning(
            "%s, of which none is known to begin or end a text, so nothing is put around it: "
            "choose with %s",
            *(told, ", ".join([*asked, *also])),
        )


def _cut_template(tokenizer: Tokenizer, names: Sequence[str], option: str) -> OptionsError:
    error = OptionsError(
        f'tokenizer "{tokenizer.source}" puts {len(names)} tokens before a text, '
        f"{' '.join(names)}, and rows have room for one: choose it with {option}, or "
        f"{option} {NOTHING}"
    )
    return hinted(error, f"{option} {quote(names[-1])}")


def _take_conventions(
    options: AlignOptions, made: Manifest, student: Tokenizer, teacher: Tokenizer
) -> AlignOptions:
    taken: dict[str, Any] = {}
    own, chosen = student.around_text, made.student.around_text
    if not options.student:
        taken["student_bos"] = _name(chosen.first_token_id, own.first_token_id)
        taken["student_eos"] = _name(chosen.end_token_id, own.end_token_id)
    if not options.teacher:
        own, chosen = teacher.around_text, made.teacher.around_text
        taken["teacher_context"] = _name(chosen.first_token_id, own.first_token_id)
    return replace(
        options, **{name: value for name, value in taken.items() if getattr(options, name) is None}
    )


def _name(chosen: int | None, own: int | None) -> str | None:
    """A token as a user writes it; None if the tokenizer's own."""
    if chosen == own:
        return None
    return NOTHING if chosen is None else str(chosen)


def _require_none_of_files(options: AlignOptions, location: str) -> None:
    for name, default in _OF_FILES.items():
        value = getattr(options, name)
        if value != default:
            raise OptionsError(
                f"--{name.replace('_', '-')} {value}: --input {location} is a dataset, whose "
                "documents have their texts, ids and metadata already; leave it out"
            )


def _real(path: str) -> str:
    return os.path.realpath(path) if storage.is_local(path) else path


def _require_other_folder(location: str, output: str) -> None:
    if f"{_real(output)}/".startswith(f"{_real(location)}/"):
        raise InputError(
            f"--output {output} is, or lies in, the dataset that --input names: a dataset can't "
            "be written over itself; choose another --output"
        )


def _require_separate(files: Sequence[InputFile], output: str) -> None:
    folder, real = _real(output).rstrip("/") + "/", cache(_real)
    paths = [
        file.path for file in files if f"{real(os.path.dirname(file.path))}/".startswith(folder)
    ]
    inside = [path for path in paths if not is_spooled(path)]
    if inside:
        raise InputError(
            f"{len(inside)} input files, such as {inside[0]}, lie in --output {output}: what the "
            "job writes there would be read the next time; choose another --output"
        )
