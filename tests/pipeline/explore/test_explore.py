"""`explore` says what the manifest, the samples and the plan say, in the terminal and on a page."""

import json
import re
import shutil
import tracemalloc
from itertools import pairwise
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import width as display_width

from pipeline.dataset.files import open_dataset
from pipeline.drawing.blocks import Block, PreviewDocument, find_blocks, lay_out, show_bytes
from pipeline.drawing.page_blocks import draw_block
from pipeline.drawing.terminal_blocks import draw_document
from pipeline.explore.command import main
from pipeline.explore.preview import load_previews
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.tokenization import reference
from schemas.document import Tokens
from schemas.manifest import MANIFEST_FILE
from tests.support.datasets import (
    build_dataset,
    byte_level,
    make_texts,
    remove_documents,
    word_pieces,
)

TEXTS = [
    ("plain", "Probability, Uncertainty"),
    ("coin", "A fair coin 🪙 is tossed.\nLet x_1 be 3.\tcafe\u0301 数学"),
    ("<script>alert(1)</script>\x1b[2J", "<b>1 < 2 & 3</b>"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    build_dataset(folder, TEXTS, num_shards=2)
    return folder


def preview(folder: Path, document_id: str, max_tokens: int = 1000) -> PreviewDocument:
    dataset = open_dataset(str(folder))
    documents = load_previews(
        dataset, num_documents=1, document_id=document_id, max_tokens=max_tokens
    )
    (document,) = documents
    return document


def side_text(document: PreviewDocument, side: str) -> str:
    return "".join(token.text for block in document.blocks for token in getattr(block, side))


def read_back(shown: str) -> bytes:
    """Return the bytes that `show_bytes` made visible."""
    for character, sign in {" ": "·", "\n": "⏎", "\t": "→", "": "◌"}.items():
        shown = shown.replace(sign, character)
    parts = re.split(r"<0x(\w\w)>", re.sub(r"<U\+(\w+)>", lambda m: chr(int(m[1], 16)), shown))
    return b"".join(bytes.fromhex(p) if n % 2 else p.encode() for n, p in enumerate(parts))


@st.composite
def monotone_spans(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Spans as an alignment gives them: starts and ends never decrease."""
    num_teacher = draw(st.integers(0, 8))
    spans, start, end = [], 0, 0
    for _ in range(draw(st.integers(0, 10))):
        if num_teacher == 0 or draw(st.booleans()):
            spans.append((start, start))
            continue
        start = draw(st.integers(start, num_teacher - 1))
        end = draw(st.integers(max(end, start + 1), num_teacher))
        spans.append((start, end))
    return np.array(spans, np.int64).reshape(-1, 2), num_teacher


def connected(spans: np.ndarray, num_teacher: int) -> set[tuple[frozenset[int], frozenset[int]]]:
    """Return the connected components of "student token i spans teacher token t", the slow way."""
    groups = [({i}, set(range(*span))) for i, span in enumerate(spans.tolist())]
    for t in range(num_teacher):
        students: set[int] = set().union(*(group[0] for group in groups if t in group[1]))
        teachers: set[int] = {t}.union(*(group[1] for group in groups if t in group[1]))
        groups = [*(group for group in groups if t not in group[1]), (students, teachers)]
    return {(frozenset(s), frozenset(t)) for s, t in groups}


@given(monotone_spans())
def test_blocks_are_the_smallest_runs_that_belong_together(case: tuple[np.ndarray, int]) -> None:
    spans, num_teacher = case
    blocks = find_blocks(spans, num_teacher)
    assert [i for (first, last), _ in blocks for i in range(first, last)] == [*range(len(spans))]
    assert [t for _, (first, last) in blocks for t in range(first, last)] == [*range(num_teacher)]
    components = {
        (frozenset(range(*student)), frozenset(range(*teacher))) for student, teacher in blocks
    }
    inside = {
        i
        for student, teacher in components
        for i in student
        if spans[i, 0] == spans[i, 1] and teacher
    }
    expected = {
        (student | (inside & set(range(min(student, default=0), max(student, default=0)))), teacher)
        for student, teacher in connected(spans, num_teacher)
        if not (student & inside and not teacher)
    }
    assert components == expected


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" the", "·the"),
        (b"\n\t\r", "⏎→␍"),
        ("🪙".encode()[:2], "<0xF0><0x9F>"),
        (b"a\x80b", "a<0x80>b"),
        ("\u0301".encode(), "◌\u0301"),
        (b"\x1b[2J", "<U+001B>[2J"),
        ("\u202e".encode(), "<U+202E>"),
        ("数".encode(), "数"),
    ],
)
def test_bytes_are_shown_as_people_read_them(data: bytes, shown: str) -> None:
    assert show_bytes(data) == shown


@pytest.mark.parametrize("keep_text", [True, False])
def test_token_texts_add_up_to_the_text(tmp_path: Path, keep_text: bool) -> None:
    build_dataset(tmp_path, TEXTS, num_shards=2, keep_text=keep_text)
    for document_id, text in TEXTS:
        document = preview(tmp_path, document_id)
        assert document.has_text
        assert read_back(side_text(document, "student")) == text.encode()
        assert read_back(side_text(document, "teacher")) == text.encode()


def test_tokens_that_the_vocabulary_cannot_spell_are_shown_by_id(tmp_path: Path) -> None:
    sides = {"student": word_pieces(), "teacher": word_pieces()}
    build_dataset(tmp_path, TEXTS[:1], num_shards=1, keep_text=False, **sides)
    document = preview(tmp_path, "plain")
    tokens = [token for block in document.blocks for token in block.student + block.teacher]
    assert not document.has_text
    assert len(tokens) > 4
    assert all(token.text == f"#{token.token_id}" for token in tokens)


def test_a_piece_of_a_document_ends_with_its_last_span(dataset: Path) -> None:
    whole, piece = preview(dataset, "coin"), preview(dataset, "coin", max_tokens=7)
    assert piece.num_shown == 7 < whole.num_shown == piece.num_student_tokens
    shown = [token for block in piece.blocks for token in block.student]
    teacher = [token for block in piece.blocks for token in block.teacher]
    assert teacher[-1].index == shown[-1].mapped[1] - 1
    assert any("more student tokens" in line for line in draw_document(piece, width=80))


def test_documents_come_in_the_order_of_the_shards(dataset: Path) -> None:
    opened = open_dataset(str(dataset))
    indices = [opened.read_index(shard, with_names=True) for shard in range(2)]
    names = [name for index in indices for name in index.document_id]
    for num in (2, 3):
        shown = load_previews(opened, num_documents=num, document_id=None, max_tokens=9)
        assert [document.title for document in shown] == names[:num]


@pytest.mark.parametrize("width", [40, 100])
def test_both_lines_of_a_block_stand_under_each_other(dataset: Path, width: int) -> None:
    document = preview(dataset, "coin")
    lines = list(draw_document(document, width=width))
    pairs = [(a, b) for a, b in pairwise(lines) if a.startswith("student  ")]
    assert len(pairs) > 1
    drawn = 0
    for top, bottom in pairs:
        assert bottom.startswith("teacher  ")
        assert max(display_width(top), display_width(bottom)) <= width
        drawn += top[9:].count("|") + len(re.split(r" {2,}", top[9:].strip()))
    assert drawn == document.num_student_tokens


def test_every_student_token_is_joined_to_its_teacher_tokens(dataset: Path) -> None:
    document = preview(dataset, "coin")
    for block in document.blocks:
        drawing = draw_block(block)
        ends = [(float(e.get("x1", "")), float(e.get("x2", ""))) for e in drawing.iter("line")]
        centres = {side: _centres(drawing, block, side) for side in ("student", "teacher")}
        expected = [
            (centres["student"][token.index], centres["teacher"][other])
            for token in block.student
            for other in range(*token.mapped)
        ]
        assert expected
        np.testing.assert_allclose(ends, expected, atol=0.15)


def _centres(drawing: Element, block: Block, side: str) -> dict[int, float]:
    boxes = [r for r in drawing.iter("rect") if (r.get("class") or "").split()[0] == side]
    return {
        token.index: float(box.get("x", "")) + float(box.get("width", "")) / 2
        for token, box in zip(getattr(block, side), boxes, strict=True)
    }


def test_a_page_on_a_full_disk_is_named(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", str(dataset), "--html", "/dev/full"]) == 2
    assert "/dev/full can't be written, for its disk is full" in capsys.readouterr().err


def test_the_page_is_self_contained_and_escaped(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "preview.html"
    assert main(["preview", str(dataset), "--html", str(page)]) == 0
    html = page.read_text("utf-8")
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;␛[2J" in html
    assert not re.search(r"http|url\(|@import|src=|href=", html)
    assert html.count("<article") == 3


def test_info_names_the_figures(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(dataset)]) == 0
    out = capsys.readouterr().out
    manifest = open_dataset(str(dataset)).manifest
    totals = manifest.totals
    expected = [
        manifest.fingerprint,
        f"documents                 {totals['num_documents']}",
        f"student tokens            {totals['num_student_tokens']}, ",
        f"{totals['num_teacher_tokens'] / totals['num_student_tokens']:.3f}",
        manifest.teacher.sha256[:16],
        "empty_text",
        "shards                    2",
    ]
    assert [figure for figure in expected if figure not in out] == []
    rows = re.findall(r"^ *[\d,]+ +(\d+) +(\d+)(?: +█+)?$", out, re.M)  # documents by length
    assert [sum(map(int, column)) for column in zip(*rows, strict=True)] == [3, 3]
    body = json.loads((dataset / MANIFEST_FILE).read_bytes())
    body["student"]["source"] = "\x1b]0;title\x07"
    hostile = Path(shutil.copytree(dataset, tmp_path / "hostile"))
    (hostile / MANIFEST_FILE).write_text(json.dumps(body), "utf-8")
    assert main(["info", str(hostile)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_info_counts_no_removed_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = make_texts(30)
    build_dataset(tmp_path / "all", texts)
    build_dataset(tmp_path / "left", texts[3:])
    remove_documents(tmp_path / "all", *(name for name, _ in texts[:3]))
    # Removed for its damage, perhaps: what is not read can't stop anyone.
    tar = next((tmp_path / "all").glob("*.tar"))
    tar.write_bytes(bytes(tar.stat().st_size))
    shown = []
    for name in ("all", "left"):
        assert main(["info", str(tmp_path / name)]) == 0
        shown.append(capsys.readouterr().out.replace(", and 3 removed", "").splitlines()[2:])
    sizes = re.compile(r"^(generation|on disk).*|  [\d.]+ \w*B$")
    assert [sizes.sub("", line) for line in shown[0]] == [sizes.sub("", line) for line in shown[1]]


def test_removed_documents_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_dataset(tmp_path / "data", TEXTS, num_shards=2)
    path = str(tmp_path / "data")
    remove_documents(tmp_path / "data", "coin")
    for name, words in (("coin", "was removed"), ("nobody", "no document")):
        assert main(["preview", path, "--id", name]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert "name an id as the input gave it" in said
    remove_documents(tmp_path / "data", *(name for name, _ in TEXTS))
    for command in ("preview", "cells", "scores", "info --by source", "plan --seq-length 8"):
        name, *more = command.split()
        assert main([name, path, *more]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert f"no document of {path} is left: all are removed" in shown.err
    assert main(["info", path]) == 0
    assert re.search(r"^byte IoU +n/a$", capsys.readouterr().out, re.M)


def test_one_tokenizer_has_no_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_dataset(tmp_path, TEXTS, student=byte_level(300), teacher=byte_level(300))
    assert main(["cells", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "start inside a teacher token          0.0%"
    assert shown[-2:] == ["", "no two tokens stand for each other"]


def test_plan_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_dataset(tmp_path, make_texts(40))
    arguments = ["--seq-length", "256", "--global-batch-size", "8"]
    assert main(["plan", str(tmp_path), *arguments]) == 0
    facts = dict(re.findall(r"^(.+?)  +(.+)$", capsys.readouterr().out, re.M))
    num_rows = int(facts["rows"])
    steps = int(facts["steps per epoch"].split()[0])
    dropped = int(facts["rows left out at an epoch's end"].split()[0])
    assert steps * 8 + dropped == num_rows
    added = int(facts["tokens added around texts"].split()[0].replace(",", ""))
    used = open_dataset(str(tmp_path)).manifest.totals["num_student_tokens"] + added
    assert facts["padding"].startswith(f"student {100 - 100 * used / num_rows / 256:.2f} %")


def test_plan_of_a_mixture_tells_stages_and_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_dataset(tmp_path / "web", make_texts(40))
    build_dataset(tmp_path / "math", make_texts(9, seed=1))
    file = tmp_path / "mixture.toml"
    file.write_text(
        '[datasets.web]\npath = "web"\nrepeat = true\n'
        '[datasets.math]\npath = "math"\nmax_epochs = 3\n'
        "[[stages]]\nweights = { web = 0.75, math = 0.25 }\n"
        "[[stages]]\nfrom_tokens = 2_000\nweights = { web = 0.5, math = 0.5 }\n"
    )
    assert main(["plan", str(file), "--seq-length", "64", "--global-batch-size", "4"]) == 0
    out = capsys.readouterr().out
    tables = re.findall(
        r"^(web|math) +([\d.]+) % +([\d,]+) .* ([\d.]+) +([\d.]+)( +█+)?$", out, re.M
    )
    assert [row[:2] for row in tables[:4]] == [
        ("web", "75.00"), ("math", "25.00"), ("web", "50.00"), ("math", "50.00")
    ]  # fmt: skip
    assert "math has given its 3 epochs: others of the stage take over" in out
    assert [row[4] for row in tables if row[0] == "math"][-1] == "3.00"
    assert re.search(r"^stage 2, rows \d+ to \d+, from 2.0\d k student tokens$", out, re.M)
    assert out.splitlines()[-1].endswith(" steps of 4 rows; the mixture has no end")
    rows = AlignedRows(StreamConfig(Reading(str(tmp_path / "math")), seq_length=64))
    assert sum(int(row[2]) for row in tables if row[0] == "math") == 3 * len(rows)
    assert main(["plan", str(file), "--seq-length", "64", "--num-steps", "10"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("10 rows, ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["preview", "DATASET", "--id", "nobody"], 'no document "nobody"'),
        (["plan", "DATASET", "--seq-length", "8", "--num-steps", "6"], "--num-steps 6 is for mix"),
        (["plan", "no.toml", "--seq-length", "8"], "[Errno 2] No such file or directory"),
        (["preview", "x", "--documents", "0"], "--documents 0: it must be at least 1"),
        (["preview", "x", "--max-tokens", "0"], "--max-tokens 0: it must be at least 1"),
        (["plan", "x", "--seq-length", "8", "--num-steps", "0"], "--num-steps 0: it must be"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(dataset) if word == "DATASET" else word for word in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"vocag explore: {words}")
    assert all(line.startswith("hint: ") for line in captured.err.splitlines()[1:])


def test_a_column_s_likely_name_comes_as_the_option(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb")
    asked = ["plan", str(dataset), "--seq-length", "8", "--where", "num_student_tokenz > 5"]
    assert main(asked) == 2
    assert capsys.readouterr().err.endswith("\nhint: --where 'num_student_tokens > 5'\n")


def test_info_fits_a_terminal(
    dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe gets each fact on one line, a terminal the same words in its width."""
    shown = {}
    for columns in ("", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["info", str(dataset)]) == 0
        shown[columns] = capsys.readouterr().out
    own = [line for line in shown["80"].splitlines() if str(dataset) not in line]
    assert max(map(len, own)) <= 80 < max(map(len, shown[""].splitlines()))
    assert shown["80"].split() == shown[""].split()


def test_of_a_long_text_only_the_shown_start_is_laid_out() -> None:
    size = 200_000
    ends = np.arange(1, size + 1)
    ranges = np.stack([ends - 1, ends], axis=1)
    tokens = Tokens(ends, ranges)
    tracemalloc.start()
    document = lay_out(
        "long", b"x" * size, tokens, tokens, ranges, num_text_bytes=size, max_tokens=56
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (document.num_shown, document.num_student_tokens) == (56, size)
    assert peak < 4 * size


def test_the_start_of_a_long_document_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text isn't kept: it is spelled by its tokens, some at a time."""
    text = "Probability, Uncertainty and the law of large numbers. " * 8000
    build_dataset(tmp_path, [("long", text)], num_shards=1, keep_text=False)
    monkeypatch.setattr(reference, "_SPELLED_AT_ONCE", 1000)
    preview(tmp_path, "long", max_tokens=1)  # loads what is needed
    tracemalloc.start()
    document = preview(tmp_path, "long", max_tokens=20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shown = "".join(token.text for block in document.blocks for token in block.student)
    assert text.startswith(shown.replace("·", " "))
    assert document.num_shown == 20
    assert peak < 60 * len(text)
