"""`report.html`: an alignment's result on one self-contained page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from beam_jobs.left_out import OF_FILES, share_lost
from beam_jobs.report import histograms
from pipeline.alignment.quality import IOU_SCALE, AlignmentStatistics
from pipeline.drawing import page_blocks
from pipeline.drawing.blocks import PreviewDocument
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_ratio,
    format_share,
    format_short,
    public_name,
)
from pipeline.drawing.web_page import Child, render_page, tag
from schemas.manifest import Manifest, ShardRecord, TokenizerRecord, totals_of

_STYLE = """
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin-top: 1.1rem; }
@media (min-width: 64rem) {
  .opening { display: grid; grid-template-columns: minmax(0, 1fr) 24rem; gap: .8rem; }
}
.cards .card { flex: 1 1 9.5rem; padding: .8rem 1rem .75rem; }
.cards .label { font-size: .82rem; color: var(--soft); }
.cards .value { font-size: 1.5rem; line-height: 1.3; font-weight: 620; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.cards .note { font-size: .8rem; color: var(--soft); }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr));
  gap: .8rem; align-items: start; }
.panel { padding: .9rem 1.1rem 1rem; min-width: 0; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; font-weight: 550; color: var(--soft); vertical-align: top; }
th, td { padding: .32rem .9rem .32rem 0; border-bottom: 1px solid var(--line); }
tr > :last-child { padding-right: 0; }
tbody tr:last-child > * { border-bottom: 0; }
td { overflow-wrap: anywhere; } td.number, th.number { overflow-wrap: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { white-space: nowrap; }
.scroll { overflow-x: auto; }
details { margin-top: .4rem; } summary { cursor: pointer; color: var(--soft); font-size: .86rem; }
"""


@dataclass(frozen=True)
class SideSummary:
    """Tokens around a side's texts, and why it has no fast path, if so."""

    convention: str
    slow_reason: str | None = None


@dataclass(frozen=True)
class RunSummary:
    """Facts known only to the run that made the dataset.

    Seconds are wall time: start to manifest, and start to first document. `input_bytes` are as
    stored. `control_strings` counts texts by their first. `max_dead_letters` is the run's limit.
    """

    runner: str
    elapsed_seconds: float
    start_up_seconds: float
    input_bytes: int
    num_input_files: int
    student: SideSummary
    teacher: SideSummary
    max_dead_letters: float
    reused_buckets: int = 0
    control_strings: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    pair: str = ""

    @property
    def aligning_seconds(self) -> float:
        """Seconds after start-up; never 0."""
        return max(self.elapsed_seconds - self.start_up_seconds, 1e-9)


def render_report(
    manifest: Manifest, run: RunSummary, documents: Sequence[PreviewDocument] = ()
) -> str:
    """Return HTML without scripts or requests."""
    statistics = AlignmentStatistics.from_json(dict(manifest.statistics))
    return render_page(
        f"{manifest.name}: aligned dataset",
        _heading(manifest, run),
        *_opening(documents, _cards(manifest, run, statistics)),
        tag("h2", "Lengths and spans"),
        *histograms.draw_histograms(statistics, _quality(statistics)),
        tag("h2", "Tokenizers"),
        _tables(
            _panel("student", _tokenizer_facts(manifest.student, run.student), class_="student"),
            _panel("teacher", _tokenizer_facts(manifest.teacher, run.teacher), class_="teacher"),
        ),
        tag("h2", "Run"),
        _run_tables(manifest, run),
        tag("h2", "Shards"),
        _shards(manifest.shards),
        style=page_blocks.STYLE + histograms.STYLE + _STYLE,
    )


def _heading(manifest: Manifest, run: RunSummary) -> Element:
    student, teacher = page_blocks.name_sides(manifest.student.source, manifest.teacher.source)
    return tag(
        "header",
        tag("h1", manifest.name),
        tag("p", "Student ", student, " aligned with teacher ", teacher, f", by {run.runner}."),
        *_first_answers(manifest, run.max_dead_letters),
    )


def _first_answers(manifest: Manifest, max_share: float) -> list[Element]:
    letters = manifest.dead_letters
    num_lost, seen = share_lost(manifest)
    left = seen - totals_of(manifest.newest_shards)["num_documents"]
    whole = f"{format_plural(seen, 'document')} ({format_share(left, seen)})"
    ranked = sorted(letters.by_reason.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{reason} {format_count(count)}" for reason, count in ranked)
    named = f"{format_count(left)} of {whole}: {reasons}; listed in {letters.file}."
    nothing = "Nothing: every document of the input is in a shard."
    right = "the offsets of every document in the shards match its text"
    limit = f"more documents are left out than --max-dead-letters {100 * max_share:.6g} % allows"
    if OF_FILES & letters.by_reason.keys():
        all_right = f"No: some of the input can't be read or used, though {right}."
    elif num_lost > max_share * seen:
        all_right = f"No: {limit}, though {right}."
    else:
        all_right = f"Yes: {right}{f', and no {limit}' if num_lost else ''}."
    answers = {
        "All right? ": all_right,
        "Left out? ": named if letters.count else nothing,
        "Next? ": "Check the files (vocag validate), store a teacher's losses (vocag score), train "
        "(vocag train).",
    }
    return [tag("p", tag("b", asked), answer) for asked, answer in answers.items()]


def _opening(documents: Sequence[PreviewDocument], cards: Element) -> list[Element]:
    if not any(document.blocks for document in documents):
        return [cards]
    legend, *texts = page_blocks.draw_documents(documents)
    return [legend, tag("div", *texts, cards, class_="opening")]


def _cards(manifest: Manifest, run: RunSummary, statistics: AlignmentStatistics) -> Element:
    totals, added = manifest.totals, totals_of(manifest.newest_shards)
    student, teacher = totals["num_student_tokens"], totals["num_teacher_tokens"]
    text = totals["num_text_bytes"]
    stored = sum(shard.num_bytes + shard.index_num_bytes for shard in manifest.shards)
    speed = added["num_student_tokens"] / run.aligning_seconds
    unmapped = student - statistics.num_mapped
    shards = format_plural(len(manifest.shards), "shard")
    if manifest.removed:
        # The report is of what the shards hold: the rest is unknown without reading them.
        shards += f"; {format_plural(manifest.removed.count, 'document')} removed and never read"
    cards = {
        "Documents": (format_count(totals["num_documents"]), shards),
        "Student tokens": (format_short(student), format_count(student)),
        "Teacher tokens": (
            format_short(teacher),
            f"{format_count(teacher)}, {format_ratio(teacher, student)} a student token",
        ),
        "Byte IoU": (f"{statistics.byte_iou:.3f}", IOU_SCALE),
        "Unmapped": (format_share(unmapped, student), f"{format_count(unmapped)} student tokens"),
        "Text": (format_bytes(text), f"{format_count(text)} bytes of UTF-8"),
        "On disk": (format_bytes(stored), f"{format_ratio(stored, student)} B / student token"),
        "Throughput": (f"{format_short(speed)}/s", "student tokens, after start-up"),
    }
    if manifest.generation:
        documents, tokens = added["num_documents"], added["num_student_tokens"]
        note = f"{format_count(documents)} documents, {format_short(tokens)} student tokens"
        cards["Generation"] = (format_count(manifest.generation), f"added {note}")
    return tag("div", *(_card(label, *said) for label, said in cards.items()), class_="cards")


def _card(label: str, value: str, note: str) -> Element:
    lines = {"label": label, "value": value, "note": note}
    children = (tag("div", text, class_=kind) for kind, text in lines.items())
    return tag("div", *children, class_="card")


def _quality(statistics: AlignmentStatistics) -> Element:
    facts = {
        "Mapped student tokens": format_count(statistics.num_mapped),
        "Byte IoU": f"{statistics.byte_iou:.3f}",
        "Byte IoS": f"{statistics.byte_ios:.3f}",
        "Over-wide student tokens": format_count(statistics.num_student_over_wide),
        "Over-wide teacher tokens": format_count(statistics.num_teacher_over_wide),
    }
    note = (
        "IoU is how much of a student token and its span is the same text. If it is low, losses "
        "are of more text than the token's. IoS, the share of the token alone, is 1 whenever the "
        "teacher's tokens cover the text without gaps. Over-wide tokens share bytes with a "
        "neighbour, because a normaliser reordered the text or made several tokens of a character: "
        "the fewer, the better."
    )
    return _panel("Quality", _facts(facts, kind="number"), tag("p", note, class_="soft small"))


def _tokenizer_facts(record: TokenizerRecord, side: SideSummary) -> Element:
    fast = side.slow_reason is None
    state = "taken: checked on the probe texts" if fast else f"not taken: {side.slow_reason}"
    return _facts(
        {
            "Source": public_name(record.source),
            "Copy": record.file,
            "SHA-256": tag("code", record.sha256),
            "Vocabulary": f"{format_count(record.vocab_size)} ids",
            "Special strings": record.special_strings,
            "Begin of sequence": _special(record.bos_token_id, record.adds_bos),
            "End of document": _special(record.eos_token_id, record.adds_eos),
            "In training rows": side.convention,
            "Fast path": tag("span", state, class_="good" if fast else "warn"),
        }
    )


def _special(token_id: int | None, added: bool) -> str:
    if token_id is None:
        return "none"
    return f"id {token_id}, {'added' if added else 'not added'} by the tokenizer"


def _run_tables(manifest: Manifest, run: RunSummary) -> Element:
    facts: dict[str, Child] = {
        "Fingerprint": tag("code", manifest.fingerprint),
        "Runner": run.runner,
        "Wall time": format_duration(run.elapsed_seconds),
        "Start-up": format_duration(run.start_up_seconds),
        "Input": f"{format_plural(run.num_input_files, 'file')}, {format_bytes(run.input_bytes)}",
        "Parts reused from an earlier run": format_count(run.reused_buckets),
        **dict(sorted(run.versions.items())),
    }
    configuration = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in sorted(manifest.configuration.items())
    }
    return _tables(
        _panel("This run", _facts(facts)), _panel("Configuration", _facts(configuration))
    )


def _shards(shards: Sequence[ShardRecord]) -> Element:
    heading = ["shard", "documents", "student tokens", "teacher tokens", "bytes", "SHA-256"]
    rows = [
        [
            shard.file,
            format_count(shard.num_documents),
            format_count(shard.num_student_tokens),
            format_count(shard.num_teacher_tokens),
            format_count(shard.num_bytes),
            shard.sha256[:16] + "…",
        ]
        for shard in shards
    ]
    summary = tag("summary", format_plural(len(shards), "shard"))
    return _panel(None, tag("details", summary, histograms.table(heading, rows)))


def _tables(*panels: Element) -> Element:
    return tag("div", *panels, class_="tables")


def _panel(title: str | None, *contents: Element, class_: str = "") -> Element:
    heading = [] if title is None else [tag("h3", title, class_=class_)]
    return tag("section", *heading, *contents, class_="card panel")


def _facts(facts: Mapping[str, Child], *, kind: str = "fact") -> Element:
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", value, class_=kind))
        for name, value in facts.items()
    ]
    return tag("table", tag("tbody", *rows))
