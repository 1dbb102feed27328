"""A part of the fuzzer: files of every format, damaged, against what a plain writer put into them.

Of the documents that damage doesn't touch each is read as it was written, or a dead letter says
that a part of the file can't be read, which ends the command with status 3. However a file is cut
into parts, they hold the same, and say together whether it holds nothing usable. Some files are
compressed under a plain name, and JSON may have odd values in a field that nobody asks for.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs.align.inputs.decompression import zstd
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import (
    DeadLetter,
    Outcome,
    PlacedDocument,
    ReadingRules,
    Reason,
)
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.parts import cut_files
from beam_jobs.align.inputs.unusable import letters_of_files, note_unusable
from beam_jobs.job_errors import InputError
from tests.fuzz.report import Fault, Report

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": partial(zstd.compress, options={zstd.CompressionParameter.checksum_flag: 1}),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
TEXTS = (
    "one line",
    "one, two",
    'he said "no"',
    "a\nline",
    "a\ttab",
    "é 北京 🤗",
    "{[}",
    "it's",
    '"',
)
INSERTED = ('"', "{", "}", "]", ",", "\n", "\\", "\0", "\ufeff", '"x"', "\t", "x")
TABLES = ("parquet", "arrow", "avro")
EDITS = ("insert", "insert", "delete", "flip", "cut", "none")
TASK_BYTES = (1, 50, 1000, 1 << 20)
MOST_PARTS = 5000
ODD = (
    *("", "", ', "title": "cut \\ud83d"', ', "title": "\\udc00"', ', "n": ' + "9" * 4400),
    *(', "title": "\udcf1\udced"', ', "m": ' + "[" * 1500 + "]" * 1500),
)
"""Members of JSON that cost no document; surrogates are bytes that aren't UTF-8."""
MOST_FAKES = 3
"""Documents that one edit may alter or make: of a row that is split, each half can be one."""
MAGIC_BYTES = 6
"""The longest of `COMPRESS`'s, xz's."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Trial:
    """A file and what happens to it; `places` are shares of its length."""

    kind: str
    suffix: str
    texts: list[str]
    style: int
    edits: list[str]
    places: list[float]
    inserted: list[str]
    is_stored: bool  # the edits meet the bytes as stored, not what they decompress to
    odd: str = ""
    is_misnamed: bool = False  # compressed under a plain name

    @property
    def has_no_quotes(self) -> bool:
        """Whether it is TSV whose quotes are text."""
        return self.kind == "tsv" and self.style % 2 == 1

    @property
    def records(self) -> list[dict[str, str]]:
        """Its documents; TSV without quotes can't hold every text."""
        spaces = str.maketrans("\t\n", "  " if self.has_no_quotes else "\t\n")
        return [{"id": f"d{n}", "text": t.translate(spaces)} for n, t in enumerate(self.texts)]


def draw_trial(choose: random.Random) -> Trial:
    """Return a file of some documents, and what happens to it."""
    kind = choose.choice(("jsonl", "json", "csv", "tsv", *TABLES))
    suffix = "" if kind in TABLES else choose.choice(["", "", *COMPRESS])
    edits = [choose.choice(EDITS) for _ in range(choose.choice((1, 1, 2)))]
    return Trial(
        kind,
        suffix,
        texts=[choose.choice(TEXTS) + f" {n}" for n in range(choose.choice((3, 20, 60)))],
        style=choose.randrange(4),
        edits=edits,
        places=[choose.random() for _ in edits],
        inserted=[choose.choice(INSERTED) for _ in edits],
        is_stored=kind in TABLES or (suffix != "" and choose.random() < 0.5),
        odd=choose.choice(ODD) if kind in ("jsonl", "json") else "",
        is_misnamed=choose.random() < 0.2,
    )


def fuzz_files(seed: str, until: float, report: Report) -> None:
    """Damage one file after another until `time.monotonic` says that it is enough."""
    while time.monotonic() < until:
        trial = draw_trial(random.Random(f"{seed} file {report.counts['files']}"))
        report.counts.update(["files", f"files: {trial.kind}{trial.suffix}"])
        if (fault := try_file(trial)) is not None:
            report.add(fault, f"{trial.kind}{trial.suffix}", {"trial": asdict(trial)})


def try_file(trial: Trial) -> Fault | None:
    """Return what is wrong with what is read of a file, None for nothing."""
    data, spans = write_file(trial)
    data, untouched = damage(trial, data, spans)
    if not data:
        return None  # an empty file holds nothing
    with tempfile.TemporaryDirectory(prefix="vocag-fuzz-") as folder:
        path = Path(folder, f"a.{trial.kind}{'' if trial.is_misnamed else trial.suffix}")
        path.write_bytes(data)
        sizes = [max(task_bytes, len(data) // MOST_PARTS) for task_bytes in TASK_BYTES]
        try:
            cut = [read_whole(path, task_bytes) for task_bytes in sizes]
            told = [is_told_unusable(path, task_bytes) for task_bytes in sizes[1:]]
        except InputError:
            return None  # refused before anything starts
        except Exception as error:
            return Fault("raises", f"{type(error).__name__}: {error}")
    outcomes = cut[-1]
    if set(told) != {is_unusable(outcomes)}:
        return Fault("unusable", f"{told} of {len(outcomes)} outcomes, by size of parts")
    if any(unlined(other) != unlined(outcomes) for other in cut):
        return Fault("parts", f"differ: {[len(other) for other in cut]} outcomes")
    return judge(trial, outcomes, untouched)


def read_whole(path: Path, task_bytes: int) -> list[Outcome]:
    """Read a file as a job does, in parts of a size."""
    parts = cut_files(find_inputs([str(path)]), task_bytes=task_bytes)
    rules = ReadingRules(max_document_bytes=1 << 12)
    return [outcome for part, _ in parts for outcome in read_part(part, rules)]


def is_unusable(outcomes: list[Outcome]) -> bool:
    """Return whether a file has dead letters alone, of which none says that it can't be read."""
    reasons = {getattr(outcome, "reason", None) for outcome in outcomes}
    return bool(reasons) and not reasons & {None, Reason.UNREADABLE_INPUT}


def is_told_unusable(path: Path, task_bytes: int) -> bool:
    """Return whether parts of a size say together that a file holds nothing usable."""
    rules, letters = ReadingRules(max_document_bytes=1 << 12), []
    with tempfile.TemporaryDirectory(prefix="vocag-fuzz-") as folder:
        for part, _ in cut_files(find_inputs([str(path)]), task_bytes=task_bytes):
            for outcome in note_unusable(read_part(part, rules), part, folder):
                if isinstance(outcome, DeadLetter):
                    letters.append(msgspec.structs.asdict(outcome))
        return bool(letters_of_files(letters, folder))


def unlined(outcomes: list[Outcome]) -> list[Any]:
    """Return outcomes without their lines, which are counted in parts."""
    return [(o.position, o.document_id, getattr(o, "text", None)) for o in outcomes]


def judge(trial: Trial, outcomes: list[Outcome], untouched: set[int]) -> Fault | None:
    """Compare outcomes with what was written."""
    documents = [o for o in outcomes if isinstance(o, PlacedDocument)]
    letters = [o for o in outcomes if not isinstance(o, PlacedDocument)]
    written = {record["id"]: record["text"].encode() for record in trial.records}
    is_said = any(letter.reason == Reason.UNREADABLE_INPUT for letter in letters)
    is_said |= is_unusable(outcomes)
    if trial.is_stored and trial.kind in ("arrow", "avro"):
        # Nothing there has a checksum: what is altered can't be seen.
        is_whole = is_said or len(outcomes) >= len(written)
        # Behind its head each block may be the last one.
        is_whole |= trial.kind == "avro" and not outcomes and "cut" in trial.edits
        return None if is_whole else Fault("lost", f"{len(outcomes)} of {len(written)} documents")
    found = {d.document_id for d in documents if written.get(d.document_id) == d.text}
    lost = sorted(n for n in untouched if f"d{n}" not in found)
    if lost and not is_said:
        reasons = [(o.position, o.reason, o.detail) for o in letters]
        return Fault("lost", f"{lost} of {len(written)} documents, letters {reasons}"[:600])
    fakes = [d for d in documents if written.get(d.document_id) != d.text]
    if untouched and len(fakes) > MOST_FAKES * len(trial.edits) and not trial.is_stored:
        return Fault("fakes", f"{[(d.document_id, d.text[:40]) for d in fakes]}"[:600])
    return None


def write_file(trial: Trial) -> tuple[bytes, list[Span]]:
    """Return a file's bytes, not yet compressed, and where each document is in them."""
    records = trial.records
    if trial.kind in TABLES:
        return _write_table(trial, pa.Table.from_pylist(records)), []
    if trial.kind in ("jsonl", "json"):
        indent = 1 if trial.style == 1 and trial.kind == "json" else None
        is_ascii = trial.style == 2
        written = (json.dumps(r, indent=indent, ensure_ascii=is_ascii) for r in records)
        pieces = [text.encode() for text in written]
        odd = len(pieces) // 2
        pieces[odd] = pieces[odd][:-1] + trial.odd.encode(errors="surrogateescape") + b"}"
        between = b"\n" if trial.kind == "jsonl" else (b", ", b",\n")[trial.style % 2]
        head, tail = (b"", b"\n") if trial.kind == "jsonl" else (b"[", b"]")
    else:
        cells = [["id", "text"], *([r["id"], r["text"]] for r in records)]
        first, *pieces = [_csv_line(trial, row) for row in cells]
        between, head, tail = b"\n", first + b"\n", b"\n"
    spans, data = [], head
    for piece in pieces:
        spans.append((len(data), len(data) + len(piece) + len(between)))
        data += piece + between
    return data.removesuffix(between) + tail, spans


def _csv_line(trial: Trial, row: list[str]) -> bytes:
    if trial.has_no_quotes:
        return "\t".join(row).encode()
    text, quoting = io.StringIO(newline=""), (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)[trial.style // 2]
    csv.writer(text, delimiter="\t" if trial.kind == "tsv" else ",", quoting=quoting).writerow(row)
    return text.getvalue().removesuffix("\r\n").encode()


def _write_table(trial: Trial, table: pa.Table) -> bytes:
    file = io.BytesIO()
    if trial.kind == "parquet":
        compression = ("none", "snappy", "zstd", "gzip")[trial.style]
        pq.write_table(
            table, file, row_group_size=7, compression=compression, write_page_checksum=True
        )
        return file.getvalue()
    if trial.kind == "avro":
        fields = [{"name": name, "type": "string"} for name in table.column_names]
        schema = {"type": "record", "name": "Document", "fields": fields}
        codec = ("null", "deflate", "bzip2", "xz")[trial.style]
        fastavro.writer(file, schema, table.to_pylist(), codec=codec)  # all in one block
        return file.getvalue()
    new = pa.ipc.new_stream if trial.style % 2 else pa.ipc.new_file
    with new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return file.getvalue()


def damage(trial: Trial, data: bytes, spans: list[Span]) -> tuple[bytes, set[int]]:
    """Return a damaged file as it is stored, and which documents its damage doesn't touch."""
    untouched = set(range(len(trial.texts)))
    compress = COMPRESS[trial.suffix]
    edited: list[tuple[int, int, str]] = []
    if trial.is_stored:
        data = _edit(trial, compress(data), lambda *edit: edited.append(edit))
        if trial.is_misnamed and any(start < MAGIC_BYTES for start, *_ in edited):
            untouched.clear()  # neither name nor first bytes say that it is compressed
        return data, untouched
    original = data
    data = _edit(trial, data, lambda *edit: edited.append(edit))
    if trial.has_no_quotes and data.endswith(b'"'):
        untouched.clear()  # cut right behind a quote: a quoted cell may end there as well
    quoted = {n for n, (a, b) in enumerate(spans) if b'"' in original[a:b]}
    for start, stop, inserted in edited:
        if spans and start < spans[0][0]:
            untouched.clear()  # a header, or a mark at the start
        touched = {n for n, (a, b) in enumerate(spans) if start < b + 1 and stop > a - 1}
        untouched -= touched
        quoted |= touched if '"' in inserted else set()
    if trial.kind == "tsv" and len(quoted) <= 2 and not quoted <= untouched:
        untouched.clear()  # where one of two is damaged, the other doesn't say what quotes are
    return compress(data), untouched


def _edit(trial: Trial, data: bytes, tell: Callable[[int, int, str], object]) -> bytes:
    """Edit from the end to the start, so that what is before an edit keeps its place."""
    edits = zip(trial.places, trial.edits, trial.inserted, strict=True)
    for share, edit, inserted in sorted(edits, reverse=True):
        place = int(share * (len(data) - _footer_bytes(trial, data) * (edit == "flip")))
        if edit == "none" or not data:
            continue
        stop = len(data) if edit == "cut" else place + 1
        tell(place, stop, inserted if edit == "insert" else "")
        if edit == "insert":
            data = data[:place] + inserted.encode() + data[place:]
        elif edit == "delete":
            data = data[:place] + data[place + 1 :]
        elif edit == "flip":
            data = data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
        else:
            data = data[:place]
    return data


def _footer_bytes(trial: Trial, data: bytes) -> int:
    """Return the length of a parquet file's footer, which has no checksum; 0 if it is gone."""
    if trial.kind != "parquet" or not data.endswith(b"PAR1"):
        return 0
    return min(8 + int.from_bytes(data[-8:-4], "little"), len(data) - 1)


def replay(body: dict[str, Any]) -> int:
    """Try the file of a failure again; return the exit status."""
    fault = try_file(Trial(**body["trial"]))
    print(f"{fault.kind}: {fault.detail}" if fault else "no failure")
    return int(fault is not None)
