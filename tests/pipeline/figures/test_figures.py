"""The figures: the paper's numbers from real vocabularies, and files that a browser can read."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.figures.chunking import measure_chunking
from pipeline.figures.command import main
from pipeline.figures.vocabulary import describe_overlaps, draw_overlaps, measure_overlaps
from tests.support.datasets import byte_level, word_pieces
from tests.support.hf_folders import write_model
from tests.support.tokenizer_zoo import SENTENCES, SHARED, needs_shared

SVG = "{http://www.w3.org/2000/svg}"
PAIR = ("--student", "a", "--teacher", "b")


@needs_shared
@pytest.mark.slow
def test_paper_overlap_of_qwen(capsys: pytest.CaptureFixture[str]) -> None:
    teachers = [str(SHARED / "qwen2_5"), str(SHARED / "mistral")]
    assert main(["vocabulary", "--student", str(SHARED / "llama2"), "--teacher", *teachers]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].split() == ["qwen2_5", "151,643", "6.32", "%", "17.37", "%"]


def test_tokens_without_bytes_have_no_share_by_bytes() -> None:
    """WordPiece against itself shared 0 %."""
    own = word_pieces()
    (found,) = measure_overlaps(own, {"itself": own})
    assert found.raw == 1.0
    *_, row, _ = describe_overlaps("own", [found])
    assert row.split()[-1] == "unknown"
    assert draw_overlaps("own", [found]) is not None


def test_tokenizers_draw_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student, teacher = (str(tmp_path / name) for name in ("student", "teacher"))
    for folder, size in ((student, 400), (teacher, 480)):
        Path(folder).mkdir()
        Path(folder, "tokenizer.json").write_bytes(byte_level(size).file_bytes)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"t": s}) + "\n" for s in SENTENCES * 4), "utf-8")
    with corpus.open("a", encoding="utf-8") as file:
        file.write('{"t": "one\u2028line"}\n')
    pair = ["--student", student, "--teacher", teacher]
    fig1, fig2, fig3 = (tmp_path / name for name in ("1.svg", "2.html", "3.pdf"))
    assert main(["vocabulary", *pair, "--output", str(fig1)]) == 0
    tokens = ["tokens", "<b>&é", "--tokenizers", student, teacher, "--output", str(fig2)]
    assert main(tokens) == 0
    texts = ["--input", str(corpus), "--text-field", "t", "--seq-length", "100"]
    alignment = ["alignment", *pair, *texts, "--chunks", "8", "16", "--output", str(fig3)]
    assert main(alignment) == 0
    texts = [text.text for text in ElementTree.parse(fig1).getroot().iter(f"{SVG}text")]
    assert {"teacher", "as decoded bytes"} <= set(texts)
    page = fig2.read_text("utf-8")
    assert "student" in page
    assert "<b>" not in page
    assert "http" not in page.split("<body>")[1]
    assert fig3.read_bytes().startswith(b"%PDF")
    out = capsys.readouterr().out
    assert "student student, teacher teacher" in out
    assert "16 chunks" in out


def test_chunk_quality_equals_a_slow_count() -> None:
    """Sequences of 50 student tokens over the ends of documents, counted byte by byte."""
    student, teacher = byte_level(400), byte_level(480)
    texts = [sentence for sentence in SENTENCES if sentence] * 2
    quality = measure_chunking(texts, student, teacher, [8], seq_length=50)
    ours: list[tuple[int, int]] = []
    theirs: list[tuple[int, int]] = []
    before = 0
    for text in texts:
        batch = align_batch([SourceDocument("d", text.encode())], student, teacher)
        ours += [(a + before, b + before) for a, b in batch.student.byte_offsets.tolist()]
        theirs += [(a + before, b + before) for a, b in batch.teacher.byte_offsets.tolist()]
        before += len(text.encode())
    ratios = []
    assert quality.num_sequences == len(ours) // 50 >= 3
    for number in range(quality.num_sequences):
        mine = ours[50 * number : 50 * number + 50]
        end = ours[50 * number + 50][0] if number + 1 < quality.num_sequences else mine[-1][1]
        other = [token for token in theirs if mine[0][0] <= token[0] < end]
        sides = [_bytes_of_chunks(np.array(side), 8) for side in (mine, other)]
        for s, t in zip(*sides, strict=True):
            ratios.append((len(s & t) / len(s | t), len(s & t) / len(s)))
    assert quality.chunks[8] == pytest.approx(np.mean(ratios, axis=0))
    assert quality.tokens[1] == 1.0 > quality.tokens[0] > quality.chunks[8][0]


def test_too_short_texts_are_refused() -> None:
    student, teacher = byte_level(400), byte_level(480)
    with pytest.raises(ValueError, match="fewer than 2048 student tokens, not one sequence"):
        measure_chunking(["a few words"], student, teacher, [8], seq_length=2048)
    with pytest.raises(ValueError, match="4 tokens of one side, fewer than 8 chunks"):
        measure_chunking(["a few words and some more"], student, teacher, [8], seq_length=4)
    with pytest.raises(ValueError, match="not one sequence"):
        measure_chunking([], student, teacher, [8], seq_length=2048)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vocabulary", "--student", "nowhere", "--teacher", "x"], "no such file or folder"),
        (["alignment", *PAIR, "--input", "BAD"], 'line 2 has no text "'),
        (["tokens", "", "--tokenizers", "x"], "the text is empty"),
        (["tokens", "a", "--tokenizers", "x", "--output", "a.svg"], "ending in .html"),
        (["vocabulary", *PAIR, "--output", "a.gif"], "a.gif: name a file that ends in .svg"),
        (["tokens", "a", "--tokenizers", "n=x", "n=y"], "several tokenizers are called n"),
    ],
)
def test_wrong_requests_say_what_to_do(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "a"}\n{"body": "b"}\n', "utf-8")
    assert main([str(corpus) if word == "BAD" else word for word in arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_a_chart_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["vocabulary", *PAIR, "--output", "a.svg"]) == 2
    assert capsys.readouterr().err.count("a.svg can't be written. Charts are drawn by") == 1


def _bytes_of_chunks(byte_offsets: np.ndarray, num_chunks: int) -> list[set[int]]:
    chunks: list[set[int]] = [set() for _ in range(num_chunks)]
    for i, (start, end) in enumerate(byte_offsets.tolist()):
        chunks[i * num_chunks // len(byte_offsets)] |= set(range(start, end))
    return chunks


def test_kept_tokens_of_two_real_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student, teacher = byte_level(400), byte_level(480)
    models = [
        str(write_model(tmp_path / name, tokenizer, seed=seed))
        for seed, (name, tokenizer) in enumerate({"small": student, "large": teacher}.items())
    ]
    text, page = "Let x_1 < x_2; then & é.", tmp_path / "kept.html"
    pair = ["--student", f"Little Llama={models[0]}", "--teacher", models[1]]
    assert main(["kept", text, *pair, "--keep-fraction", "0.5", "--output", str(page)]) == 0
    num_tokens = len(student.tokenize_batch([text.encode()]).input_ids)
    out = capsys.readouterr().out
    assert out.startswith(f"{num_tokens} student tokens, 100 % mapped")
    html = page.read_text("utf-8")
    assert "Little Llama" in html
    assert "Little Llama=" not in html
    # One arrow for each kept token, dashed links for the others, three numbers on hover.
    assert html.count("<polygon") == num_tokens // 2
    assert html.count("<line") >= num_tokens
    assert html.count(": kept</title>") == num_tokens // 2
    assert html.count(": dropped</title>") == num_tokens - num_tokens // 2
    assert "<script" not in html
