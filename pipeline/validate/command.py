"""`vocag validate`: check every byte of a dataset."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pipeline.command_line import failures
from pipeline.command_line.failures import printable
from pipeline.command_line.option_parsing import DatasetSource, ModelSource, parse_options
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_short,
)
from pipeline.validate.findings import CHECKS, Finding

if TYPE_CHECKING:
    from pipeline.validate.dataset_checks import ValidationReport

CLEAN, FOUND, CANNOT_RUN = 0, 1, 2
SHOWN_PER_CHECK = 10
BYTES_PER_PROCESS = 512 << 20
"""Starting a process costs as much as checking some hundred megabytes."""


def _describe_checks() -> str:
    width = max(map(len, CHECKS))
    return "\n".join(f"  {name:{width}}  {text}" for name, text in CHECKS.items())


_EPILOG = f"""\
checks:
{_describe_checks()}

examples:
  vocag validate aligned
      Check every file, member, sample and token.
  vocag validate aligned --tokenizers --workers 8
      Tokenize kept text again, too (align with --keep-text), with 8 workers.
  vocag validate aligned --teacher models/teacher
      Score some documents again, and compare with what vocag score has stored.
  vocag validate gs://bucket/aligned --json > findings.json
      Any store that fsspec opens; all findings for a program.

exit status: {CLEAN} no findings, {FOUND} findings, {CANNOT_RUN} could not run.
"""


@dataclass(frozen=True)
class ValidateOptions:
    """Check a dataset: is every byte what manifest, index and samples say it is?

    Attributes:
        dataset: folder, URL or manifest of a dataset.
        tokenizers: tokenize kept text again, on the reference path, with the dataset's own
            tokenizers.
        teacher: score some documents again with this model, others each time, and compare with
            the stored losses.
        json: print one JSON object with everything, instead of text.
        workers: check N shards at once (default: as many as the size of the dataset is worth).
    """

    dataset: DatasetSource
    tokenizers: bool = False
    teacher: ModelSource | None = None
    json: bool = False
    workers: int = 0

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("DATASET is empty: name a dataset's folder or manifest")
        if self.workers < 0:
            raise ValueError(f"--workers {self.workers}: it must be 0 or more")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        options = parse_options(ValidateOptions, argv, prog="vocag validate", epilog=_EPILOG)
        report = _validate(options)
    except (ValueError, OSError, BrokenProcessPool) as error:
        failures.report("vocag validate", error)
        return CANNOT_RUN
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print("\n".join(render_text(report)))
    return FOUND if report.findings else CLEAN


def render_text(report: "ValidationReport") -> Iterator[str]:
    """Yield findings, then a summary."""
    for (check, shard), group in groupby(report.findings, key=lambda f: (f.check, f.shard)):
        findings = list(group)
        for finding in findings[:SHOWN_PER_CHECK]:
            yield _render(finding)
        if len(findings) > SHOWN_PER_CHECK:
            rest = format_count(len(findings) - SHOWN_PER_CHECK)
            yield f"{check}: {printable(shard)}: {rest} more like these (--json lists all)"
    for note in report.notes:
        yield f"note: {printable(note)}"
    yield from _summary(report)


def _validate(options: ValidateOptions) -> "ValidationReport":
    # Here, after the options: help needs no numpy.
    from tqdm import tqdm

    from pipeline.validate.dataset_checks import validate_dataset

    # disable=None: no bar if stderr isn't a terminal.
    with tqdm(unit="B", unit_scale=True, desc="validating", disable=None, leave=False) as bar:
        bar.total = _num_bytes(options.dataset)
        worthwhile = (bar.total or 0) // BYTES_PER_PROCESS
        num_processes = options.workers or max(1, min(os.cpu_count() or 1, worthwhile))
        return validate_dataset(
            options.dataset,
            with_tokenizers=options.tokenizers,
            teacher=options.teacher,
            num_processes=num_processes,
            advance=bar.update,
        )


def _num_bytes(dataset: str) -> int | None:
    """Return the bytes to read; None for a damaged manifest, reported later."""
    from pipeline.dataset.dataset_reading import read_manifest

    try:
        return read_manifest(dataset).totals["num_bytes"]
    except ValueError:
        return None


def _render(finding: Finding) -> str:
    place = [part for part in (finding.shard, finding.key) if part]
    return printable(": ".join([finding.check, *place, finding.message]))


def _summary(report: "ValidationReport") -> Iterator[str]:
    totals = report.totals
    if totals:
        seconds = max(report.elapsed_seconds, 1e-9)
        count = totals["num_removed"]
        removed = f" ({format_count(count)} of them removed)" if count else ""
        yield (
            f"{format_plural(totals['num_shards'], 'shard')}, "
            f"{format_plural(totals['num_documents'], 'document')}{removed}, "
            f"{format_short(totals['num_student_tokens'])} student tokens, "
            f"{format_bytes(totals['num_bytes'])} in {format_duration(seconds)} "
            f"({format_short(totals['num_student_tokens'] / seconds)} student tokens/s)"
        )
    if report.num_tokenized_again is not None:
        texts = format_plural(report.num_tokenized_again, "kept text")
        yield f"{texts} tokenized again by both tokenizers"
    counts = Counter(finding.check for finding in report.findings)
    if not counts:
        yield f"clean: {printable(report.dataset)} keeps every rule"
        return
    parts = ", ".join(f"{check} {format_count(count)}" for check, count in sorted(counts.items()))
    yield f"{format_plural(sum(counts.values()), 'finding')}: {parts}"
