"""How two configurations differ, by command-line options."""

import json
from collections.abc import Mapping
from shlex import quote
from typing import Any

from beam_jobs import storage
from beam_jobs.align.options import AlignOptions
from beam_jobs.resuming import describe_differences
from pipeline.command_line.option_parsing import option_names
from pipeline.drawing.formatting import format_bytes, format_plural

_OPTIONS = {
    **{flag.removeprefix("--").replace("-", "_"): flag for flag in option_names(AlignOptions)},
    "input_sha256": "--input",
    "input_dataset": "--input",
    "student_sha256": "--student",
    "teacher_sha256": "--teacher",
    "input_where": "--where",
    "student_convention": "the token of --student-bos or --student-eos",
    "teacher_convention": "the token of --teacher-context",
}
_FOLLOWS = {"num_buckets", "input_files", "input_bytes", "input_generation"}
"""Not named: they follow from the input and the size of shards."""


def describe_configurations(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], *, output: str, sources: Mapping[str, str]
) -> str:
    """Name differing options with both values; "" if none.

    `theirs` made the dataset in `output`; `sources` are the user's names for our tokenizers.
    """
    names = {name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)} - _FOLLOWS
    copies = {side: storage.join(output, "tokenizers", side) for side in sources}
    told = {}
    for name in names:
        there, here = _describe(name, theirs, copies), _describe(name, ours, sources)
        if there != here:  # of a dataset, a part has the dataset's name
            option = _OPTIONS.get(name, name)
            told[option] = f"{option} is {there} there and {here} here"
    return "; ".join(told[name] for name in sorted(told)) or describe_differences(theirs, ours)


def options_to_paste(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The options that make ours theirs; "" if one isn't a plain value of an option."""
    words = []
    for name in sorted({*theirs, *ours}):
        value, option = theirs.get(name), f"--{name.replace('_', '-')}"
        if value == ours.get(name):
            continue
        if not value or isinstance(value, Mapping) or _OPTIONS.get(name) != option:
            return ""
        words += [option] if value is True else [option, quote(str(value))]
    return " ".join(words)


def _describe(name: str, configuration: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    value, side = configuration.get(name), name.removesuffix("_sha256")
    if name in ("input_sha256", "input_dataset"):
        return _describe_input(configuration)
    if value and side in sources:
        return f"{sources[side]} (SHA-256 {value[:8]}…)"
    return (value if isinstance(value, str) else json.dumps(value)) if value else "not given"


def _describe_input(configuration: Mapping[str, Any]) -> str:
    if "input_dataset" in configuration:
        number = configuration["input_generation"]
        return f"generation {number} of the dataset {configuration['input_dataset'][:16]}…"
    files = format_plural(configuration["input_files"], "file")
    names = configuration["input_sha256"][:8]
    return f"{files} of {format_bytes(configuration['input_bytes'])} (names and sizes {names}…)"
