"""The configuration that identifies a dataset."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs.align.differences import describe_configurations, options_to_paste
from beam_jobs.align.inputs.input_files import describe_inputs
from beam_jobs.align.opened_input import OpenedInput
from beam_jobs.align.options import AlignOptions
from beam_jobs.generations import read_newest
from beam_jobs.job_errors import OptionsError
from beam_jobs.resuming import (
    APPEND_TO,
    Describe,
    added_to,
    find_finished,
    require_all_files,
    run_folder_of,
)
from pipeline.command_line.failures import hinted
from pipeline.dataset.conventions import NOTHING, describe_tokenizer
from pipeline.tokenization import Tokenizer
from schemas.document import SCHEMA_VERSION
from schemas.manifest import Manifest, TokenizerRecord

_OF_THE_INPUT = {
    *("input_files", "input_bytes", "input_sha256", "format", "overlap_sha256"),
    *("input_dataset", "input_generation", "input_where", "input_scores"),
    *("num_buckets", "schema_version", APPEND_TO),
}
"""What may differ from generation to generation; all else must stay."""


@dataclass(frozen=True)
class Attempt:
    """One start of the command; `started` is by `time.monotonic()`."""

    opened: OpenedInput
    configuration: Mapping[str, Any]
    beam_options: PipelineOptions
    started: float

    @property
    def options(self) -> AlignOptions:
        """All filled in."""
        return self.opened.options

    @property
    def output(self) -> str:
        """The dataset's folder."""
        return self.options.output

    @property
    def run_folder(self) -> str:
        """Temporary files and commit records, earlier attempts' included."""
        return run_folder_of(self.output, self.configuration)

    def find_made(self) -> Manifest | None:
        """The generation that this configuration made; of --append, only the newest."""
        if not self.options.append:
            return find_finished(self.output, self.configuration, _describe(self.opened))
        manifest = read_newest(self.output)
        return manifest if manifest.configuration == self.configuration else None


def configure(opened: OpenedInput) -> dict[str, Any]:
    """Everything that determines the dataset; OptionsError if --append can't add to it."""
    options, dataset = opened.options, opened.dataset
    configuration = {
        "schema_version": SCHEMA_VERSION,
        "name": options.name,
        "num_buckets": opened.num_buckets,
        "shard_bytes": options.shard_bytes,
        "keep_text": bool(options.keep_text),
        "special_strings": options.special_strings,
        "format": options.format,
        "student_sha256": opened.tokenizers[0].sha256,
        "teacher_sha256": opened.tokenizers[1].sha256,
        **_rules_of(opened),
        "metadata": opened.metadata,
        **describe_inputs(opened.files),
        **({} if dataset is None else dataset.identity),
        **({} if opened.chats is None else opened.chats.identity),
        **_chosen_conventions(options, opened.tokenizers),
    }
    if not options.append:
        return configuration
    return _append_configuration(options.output, configuration, _describe(opened))


def _rules_of(opened: OpenedInput) -> dict[str, Any]:
    rules = asdict(opened.rules)
    return {n: v for n, v in rules.items() if v or n not in ("messages_field", "tools_field")}


def tokenizer_records(
    options: AlignOptions, tokenizers: tuple[Tokenizer, Tokenizer]
) -> tuple[TokenizerRecord, TokenizerRecord]:
    """Describe both tokenizers for the manifest; TokenizerError if one lacks a token.

    Templates render the tokens around chats; pieces that continue one begin like a text.
    """
    student, teacher = tokenizers
    if options.chats.messages:
        return tuple(  # type: ignore[return-value]
            replace(
                record,
                convention=replace(record.around_text, first_token_id=None, end_token_id=None),
            )
            for record in (
                describe_tokenizer(student, "tokenizers/student", after=NOTHING),
                describe_tokenizer(teacher, "tokenizers/teacher", after=NOTHING),
            )
        )
    return (
        describe_tokenizer(
            student, "tokenizers/student", before=options.student_bos, after=options.student_eos
        ),
        # Rows end a teacher's text with nothing.
        describe_tokenizer(
            teacher, "tokenizers/teacher", before=options.teacher_context, after=NOTHING
        ),
    )


def _append_configuration(
    output: str, configuration: Mapping[str, Any], describe: Describe
) -> dict[str, Any]:
    """Add the existing shards to a configuration.

    A run of the newest generation keeps its own.
    """
    manifest = read_newest(output)
    require_all_files(output, manifest)
    made = dict(manifest.configuration)
    before = made.pop(APPEND_TO, None)
    if made != dict(configuration) or before is None:
        _require_alike(output, manifest, configuration, describe)
        before = added_to(manifest)
    return {**configuration, APPEND_TO: before}


def _require_alike(
    output: str, manifest: Manifest, configuration: Mapping[str, Any], describe: Describe
) -> None:
    there, here = (
        {name: value for name, value in each.items() if value and name not in _OF_THE_INPUT}
        for each in (manifest.configuration, configuration)
    )
    if there != here:
        error = OptionsError(
            f"--append: {output} was made with other options: {describe(there, here)}; all "
            "documents of a dataset are made with the same options: use those, or another --output"
        )
        options = options_to_paste(there, here)
        raise hinted(error, options) if options else error


def _describe(opened: OpenedInput) -> Describe:
    sides = zip(("student", "teacher"), opened.tokenizers, strict=True)
    sources = {side: tokenizer.source for side, tokenizer in sides}
    return partial(describe_configurations, output=opened.options.output, sources=sources)


def _chosen_conventions(
    options: AlignOptions, tokenizers: tuple[Tokenizer, Tokenizer]
) -> dict[str, Any]:
    """Conventions that differ from the tokenizers' own."""
    plain = replace(options, student_bos=None, student_eos=None, teacher_context=None)
    own, chosen = (tokenizer_records(o, tokenizers) for o in (plain, options))
    pairs = zip(("student", "teacher"), own, chosen, strict=True)
    return {f"{side}_convention": asdict(b.around_text) for side, a, b in pairs if a != b}
