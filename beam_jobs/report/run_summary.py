"""A run's last lines, and its report."""

import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

from beam_jobs import storage
from beam_jobs.left_out import OF_FILES, find_unread
from beam_jobs.report.card import CARD_FILE, MARK, render_card
from beam_jobs.report.page import RunSummary, render_report
from pipeline.dataset.chosen_documents import why_nothing
from pipeline.dataset.files import Dataset
from pipeline.dataset.groups import count_read
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_short,
)
from pipeline.explore.preview import load_previews
from schemas.manifest import Manifest, totals_of

REPORT_FILE = "report.html"
_SHOWN_UNREAD = 5
_SHOWN_TOKENS = 56
"""Student tokens at the report's top: as high as the numbers next to them."""

_LIBRARIES = ("vocag", "apache-beam", "fastokens", "tokenizers", "sentencepiece", "numpy", "numba",
              "pyarrow", "safetensors")  # fmt: skip


def library_versions() -> dict[str, str]:
    """Versions of Python and of libraries that shape the result."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def write_report(manifest: Manifest, run: RunSummary, *, output: str, scratch: str) -> str:
    """Write `report.html` and the card; return the report's path."""
    path = storage.join(output, REPORT_FILE)
    dataset = Dataset(output, manifest)
    shown = load_previews(dataset, num_documents=1, document_id=None, max_tokens=_SHOWN_TOKENS)
    report = render_report(manifest, run, list(shown))
    storage.write_atomically(path, report.encode(), scratch=scratch)
    write_card(manifest, output=output, scratch=scratch)
    return path


def write_card(manifest: Manifest, *, output: str, scratch: str) -> None:
    """Write the card, unless a person wrote the `README.md`."""
    path = storage.join(output, CARD_FILE)
    if storage.num_bytes_of(path) is None or MARK.encode() in storage.read_bytes(path):
        card = render_card(manifest, count_read(Dataset(output, manifest)))
        storage.write_atomically(path, card.encode(), scratch=scratch)


def summarise(manifest: Manifest, run: RunSummary, *, output: str) -> str:
    """A run's last lines."""
    totals = totals_of(manifest.newest_shards)
    student_tokens, documents = totals["num_student_tokens"], totals["num_documents"]
    speed = student_tokens / run.aligning_seconds
    lines = [
        f"aligned {format_plural(documents, 'document')} "
        f"({format_bytes(totals['num_text_bytes'])}) in {format_duration(run.elapsed_seconds)}",
        f"  start-up        {format_duration(run.start_up_seconds)}: imports, tokenizers, a first "
        "look at the input",
        f"  aligning        {format_duration(run.aligning_seconds)}: {format_short(speed)} student "
        "tokens/s, read, tokenized twice, written",
        f"  student tokens  {format_count(student_tokens)}",
        f"  teacher tokens  {format_count(totals['num_teacher_tokens'])}",
        *_around_texts(manifest, run),
        f"  shards          {len(manifest.newest_shards)}, {format_bytes(totals['num_bytes'])}, "
        f"{totals['num_bytes'] / max(student_tokens, 1):.2f} bytes a student token",
        f"  dead letters    {_dead_letters(manifest)}",
    ]
    if manifest.student.sha256 == manifest.teacher.sha256:
        lines.append("  one tokenizer   the teacher's is the student's: every token maps to itself")
    elif run.pair:
        lines.append(f"  pair            {run.pair}")
    if manifest.chats is not None:
        lines += _of_chats(Dataset(output, manifest))
    if OF_FILES & manifest.dead_letters.by_reason.keys():
        unread = find_unread(storage.join(output, manifest.dead_letters.file))
        lines += [f"  unread          {place}" for place in unread[:_SHOWN_UNREAD]]
    lines += _control_strings(run) + _reference_paths(manifest, run)
    if run.reused_buckets:
        lines.append(f"  resumed         {format_plural(run.reused_buckets, 'part')} taken over")
    if manifest.generation:
        num_removed = 0 if manifest.removed is None else manifest.removed.count
        whole = format_plural(manifest.totals["num_documents"] - num_removed, "document")
        shards = format_plural(len(manifest.shards), "shard")
        told = f"{manifest.generation}, with {whole} in {shards}"
        told += f", and {format_count(num_removed)} removed" if num_removed else ""
        lines.append(f"  generation      {told}")
    return "\n".join(lines)


def _control_strings(run: RunSummary) -> list[str]:
    if not run.control_strings:
        return []
    name, _ = max(run.control_strings.items(), key=lambda item: item[1])
    texts = format_plural(sum(run.control_strings.values()), "text")
    return [
        f"  control strings {texts} with one, most often {name}, read as plain characters by both "
        "sides; --special-strings honoured reads them as tokens"
    ]


def _around_texts(manifest: Manifest, run: RunSummary) -> list[str]:
    told = [run.student.convention, run.teacher.convention]
    if manifest.chats is not None:
        sides = manifest.chats.student, manifest.chats.teacher
        told = [f"in its chat template ({side.sha256[:8]}…)" for side in sides]
    return [f"  student text    {told[0]}", f"  teacher text    {told[1]}"]


def _of_chats(dataset: Dataset) -> list[str]:
    num_shards, sums = len(dataset.manifest.shards), Counter[str]()
    for number in range(num_shards - len(dataset.manifest.newest_shards), num_shards):
        chats = dataset.read_index(number).chats
        sums.update({name: int(chats[name].sum()) for name in chats if name.startswith("num_")})
    lines = [
        f"  learned         {format_count(sums['num_learned_student_tokens'])} student tokens, "
        f"{format_bytes(sums['num_learned_bytes'])} of text"
    ]
    record = dataset.manifest.chats
    if record is not None and not sums["num_learned_student_tokens"]:
        lines[0] += f"; can't be trained on: {why_nothing(record.learn)}"
    if sums["num_control_strings"]:
        lines.append(
            f"  control tokens  {format_count(sums['num_control_strings'])} in texts, read as such "
            "(--special-strings plain leaves such chats out)"
        )
    if sums["num_seams"]:
        lines.append(
            f"  seams           {format_count(sums['num_seams'])} learned tokens cross into the "
            f"template's text, {format_count(sums['num_lone_seams'])} of them where no teacher "
            "token does so: these get no distribution"
        )
    return lines


def _reference_paths(manifest: Manifest, run: RunSummary) -> list[str]:
    sides = ((manifest.student.source, run.student), (manifest.teacher.source, run.teacher))
    slow = dict.fromkeys((source, side.slow_reason) for source, side in sides if side.slow_reason)
    return [
        f"  reference path  {source} encodes 8 to 100 times slower, with the same ids: {reason}"
        for source, reason in slow
    ]


def _dead_letters(manifest: Manifest) -> str:
    reasons = [f"{name} {format_count(n)}" for name, n in manifest.dead_letters.by_reason.items()]
    details = f" ({', '.join(reasons)})" if reasons else ""
    return f"{format_count(manifest.dead_letters.count)}{details}"
