"""The report shows every figure, holds nothing but itself, and escapes whatever it is given."""

import re
import sys
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from beam_jobs.left_out import UNREAD
from beam_jobs.report.page import RunSummary, SideSummary, render_report
from beam_jobs.report.run_summary import summarise
from pipeline.alignment.quality import AlignmentStatistics
from pipeline.dataset.files import Dataset
from pipeline.drawing.charts import NOT_DRAWN
from pipeline.drawing.formatting import format_bytes, format_count, format_plural, format_short
from pipeline.explore.preview import load_previews
from schemas.manifest import DeadLetterRecord, Manifest, totals_of
from tests.support.datasets import build_dataset

HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\ud800"
RUN = RunSummary(
    runner="DirectRunner",
    elapsed_seconds=125.0,
    start_up_seconds=5.0,
    input_bytes=8_388_608,
    num_input_files=3,
    student=SideSummary("<s> (1) before a text"),
    teacher=SideSummary("nothing before a text", "fastokens can't read it"),
    max_dead_letters=0.2,
    reused_buckets=5,
    versions={"tokenizers": "0.23.3"},
)


class Page(HTMLParser):
    """Collects a page's tags, attributes and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.lasttag != "style":
            self.text += data + "\n"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    letters = [("a", "bad_json"), ("b", "bad_json"), ("c", "too_large")]
    return build_dataset(tmp_path_factory.mktemp("data"), dead_letters=letters)


@pytest.mark.parametrize("same", [False, True])
def test_the_summary_says_once_what_a_slow_tokenizer_costs(manifest: Manifest, same: bool) -> None:
    source = manifest.student.source if same else "google/gemma"
    told = replace(manifest, teacher=replace(manifest.teacher, source=source))
    run = replace(RUN, student=RUN.teacher) if same else RUN
    lines = summarise(told, run, output="o").splitlines()
    speed = format_short(totals_of(manifest.newest_shards)["num_student_tokens"] / 120)
    assert lines[:3] == [
        f"aligned {format_plural(manifest.totals['num_documents'], 'document')} "
        f"({format_bytes(manifest.totals['num_text_bytes'])}) in 2 min 5 s",
        "  start-up        5.0 s: imports, tokenizers, a first look at the input",
        f"  aligning        2 min 0 s: {speed} student tokens/s, read, tokenized twice, written",
    ]
    assert [line for line in lines if "reference path" in line] == [
        f"  reference path  {source} encodes 8 to 100 times slower, with the same ids: "
        "fastokens can't read it"
    ]


def test_every_figure_is_there(manifest: Manifest) -> None:
    text = Page(render_report(manifest, RUN)).text
    statistics = AlignmentStatistics.from_json(dict(manifest.statistics))
    totals = manifest.totals
    on_disk = totals["num_bytes"] + sum(shard.index_num_bytes for shard in manifest.shards)
    student, teacher = totals["num_student_tokens"], totals["num_teacher_tokens"]
    expected = {
        *(format_count(count) for name, count in totals.items() if name != "num_bytes"),
        manifest.fingerprint,
        f"{teacher / student:.3f}",
        f"{statistics.byte_iou:.3f}",
        f"{statistics.byte_ios:.3f}",
        format_count(statistics.num_mapped),
        f"{on_disk / student:,.3f} B / student token",
        manifest.student.sha256,
        manifest.teacher.sha256,
        f"{manifest.teacher.vocab_size} ids",
        "taken: checked on the probe texts",
        "not taken: fastokens can't read it",
        "<s> (1) before a text",
        "DirectRunner",
        "2 min 5 s",
        "3 files, 8.39 MB",
        "tokenizers",
        "0.23.3",
        "keep_text",
        f"3 of {totals['num_documents'] + 3} documents",
        ": bad_json 2, too_large 1; listed in dead_letters.jsonl.",
        f"{format_short(student / 120)}/s",
        *(shard.file for shard in manifest.shards),
    }
    assert {figure for figure in expected if figure not in text} == set()


@pytest.mark.parametrize(
    ("by_reason", "limit", "answer"),
    [
        ({}, 0.0, "Yes: {}."),
        ({"known_id": 20}, 0.0, "Yes: {}."),
        ({"bad_json": 6}, 0.2, "Yes: {}, and no more documents are left out than 20 % allows."),
        ({"bad_json": 6}, 0.19, "No: more documents are left out than 19 % allows, though {}."),
        ({UNREAD: 1}, 0.2, "No: some of the input can't be read or used, though {}."),
    ],
)
def test_all_is_right_by_the_limit_that_decides_the_job_s_status(
    manifest: Manifest, by_reason: dict[str, int], limit: float, answer: str
) -> None:
    counts = {"count": sum(by_reason.values()), "by_reason": by_reason}
    told = replace(manifest, dead_letters=replace(manifest.dead_letters, **counts))
    text = Page(render_report(told, replace(RUN, max_dead_letters=limit))).text
    wanted = answer.format("the offsets of every document in the shards match its text")
    assert f"\n{wanted}\n".replace("than ", "than --max-dead-letters ") in text


@pytest.mark.parametrize("is_drawn", [True, False])
def test_histograms_are_drawn_and_tabled_in_full(
    manifest: Manifest, is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_drawn:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = render_report(manifest, RUN)
    assert Page(html).tags.count("svg") == 3 * is_drawn
    assert html.count(NOT_DRAWN) == (not is_drawn)
    for name in ("span_width_counts", "student_token_bytes_counts", "teacher_length_counts"):
        counts = [count for count in manifest.statistics[name] if count]
        assert counts
        assert [c for c in counts if f">{format_count(c)}</td>" not in html] == []


def test_the_page_is_self_contained(manifest: Manifest) -> None:
    html = render_report(manifest, RUN)
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset")]
    assert [value for value in links if not value.startswith("#")] == []
    assert "http" not in html
    assert not re.search(r"url\([^#]|@import", html)


def test_hostile_text_stays_text(manifest: Manifest) -> None:
    hostile = replace(
        manifest,
        name=HOSTILE,
        student=replace(manifest.student, source=HOSTILE),
        shards=(replace(manifest.shards[0], file=HOSTILE), *manifest.shards[1:]),
        dead_letters=DeadLetterRecord(HOSTILE, "0" * 64, 1, {HOSTILE: 1}),
        configuration={HOSTILE: [HOSTILE]},
    )
    teacher = SideSummary(HOSTILE, HOSTILE)
    run = replace(RUN, runner=HOSTILE, teacher=teacher, versions={HOSTILE: HOSTILE})
    html = render_report(hostile, run)
    usual = Page(render_report(manifest, RUN))
    page = Page(html)
    assert set(page.tags) == set(usual.tags)
    assert {name for name, _ in page.attributes} == {name for name, _ in usual.attributes}
    assert page.text.count("<script>alert(1)</script>") >= 9
    assert html.encode().decode() == html
    assert "\x00" not in html


def test_a_dataset_without_documents(tmp_path: Path) -> None:
    manifest = build_dataset(tmp_path, [("only", "")], num_shards=1, dead_letters=())
    empty = replace(manifest, shards=(), statistics=AlignmentStatistics.empty().to_json())
    for one in (manifest, empty):
        text = Page(render_report(one, RUN)).text
        assert "Nothing: every document of the input is in a shard." in text
        assert "\nYes: the offsets of every document in the shards match its text.\n" in text
        assert "nan" not in text


def test_it_opens_with_aligned_text_under_short_names(tmp_path: Path) -> None:
    manifest = build_dataset(tmp_path, keep_text=True)
    manifest = replace(manifest, student=replace(manifest.student, source="a/one/tokenizer.json"))
    (document,) = load_previews(
        Dataset(str(tmp_path), manifest), num_documents=1, document_id=None, max_tokens=5
    )
    html = render_report(manifest, RUN, [document])
    for block in document.blocks:
        for token in (*block.student, *block.teacher):
            assert f">{escape(token.text, quote=False)}</text>" in html
    assert html.index(f">{escape(document.title)}</h2>") < html.index(">Lengths and spans</h2>")
    assert '<span class="student" title="a/one/tokenizer.json">one</span>' in html
