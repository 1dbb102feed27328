"""Documents that hold test questions are left out when they are listed, and only then."""

import json
from pathlib import Path

import pytest

from beam_jobs.align.__main__ import main
from pipeline.dataset.reading import read_manifest
from tests.support.corpus import (
    Corpus,
    align_options,
    command_line,
    json_line,
    make_text,
)


def arguments(folder: Path, output: Path, *more: str) -> list[str]:
    options = align_options(Corpus(folder), output, max_dead_letters=0.01)
    return [*command_line(options), *more]


def write_input(folder: Path, numbers: range) -> Path:
    (folder / "in").mkdir(parents=True)
    lines = [json_line(f"forum/{n}", make_text(n)) for n in numbers]
    (folder / "in" / "a.jsonl").write_bytes(b"".join(lines))
    return folder


def write_list(path: Path, *numbers: int) -> Path:
    words = " ".join(map(str, range(13)))
    lines = [
        {"document_id": f"forum/{n}", "set": "gsm8k", "place": 17, "words": words} for n in numbers
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_listed_documents_are_dead_letters_with_a_reason_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_input(tmp_path / "corpus", range(20))
    # One is listed twice, one is no document of this input.
    overlap = write_list(tmp_path / "overlap.jsonl", 3, 3, 7, 99)
    output = tmp_path / "out"
    command = arguments(folder, output, f"--exclude-overlap={overlap}")
    assert main(command) == 0, "a tenth is left out, as asked: no failure at 1 %"
    manifest = read_manifest(str(output))
    assert manifest.totals["num_documents"] == 18
    assert manifest.dead_letters.by_reason == {"overlap": 2}
    letters = [json.loads(line) for line in (output / "dead_letters.jsonl").open()]
    assert {letter["document_id"] for letter in letters} == {"forum/3", "forum/7"}
    assert {letter["detail"] for letter in letters} == {"13 words of gsm8k 17 stand in it"}
    capsys.readouterr()
    assert main(command) == 0
    assert "nothing to do" in capsys.readouterr().out
    # Another list is another dataset.
    write_list(overlap, 3)
    assert main(command) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not there: vocag overlap makes it"),
        ('{"document_id": "a"}\n', "line 1 is none of vocag overlap"),
    ],
)
def test_a_list_that_is_none_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_input(tmp_path / "corpus", range(2))
    overlap = tmp_path / "overlap.jsonl"
    if content is not None:
        overlap.write_text(content)
    assert main(arguments(folder, tmp_path / "out", f"--exclude-overlap={overlap}")) == 2
    assert message in capsys.readouterr().err
