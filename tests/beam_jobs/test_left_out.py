"""A job that leaves out more than it may: its own exit status, and a sentence that helps."""

from pathlib import Path

import pytest

from beam_jobs.align.__main__ import main
from beam_jobs.align.options import parse_options
from beam_jobs.job_errors import OptionsError
from pipeline.dataset.dataset_reading import read_manifest
from tests.support.corpus import (
    Corpus,
    align_options,
    command_line,
    json_line,
    make_text,
    small_corpus,
)


def numbered_files(folder: Path) -> Corpus:
    """Write files whose documents are numbered from 0 in each, as exports often are."""
    numbers = {file: range(100 * file, 100 * file + 25) for file in range(4)}
    files = {
        f"part-{file}": [json_line(n % 100, make_text(n)) for n in own]
        for file, own in numbers.items()
    }
    return small_corpus(folder, **files)


def arguments(corpus: Corpus, output: Path, *more: str) -> list[str]:
    return [*command_line(align_options(corpus, output, max_dead_letters=0.01)), *more]


def test_ids_that_repeat_in_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = arguments(numbered_files(tmp_path / "corpus"), tmp_path / "out")
    assert main(command) == 3
    captured = capsys.readouterr()
    assert "aligned 25 documents" in captured.out  # the dataset is there all the same
    assert read_manifest(str(tmp_path / "out")).dead_letters.count == 75
    assert "No: more documents are left out" in (tmp_path / "out" / "report.html").read_text()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("vocag align:")]
    assert "75 of 100 documents (75.00 %) are left out, more than --max-dead-letters 1 %" in line
    assert "duplicate_id 75 (first: part-1.jsonl line 1: the id was first used at " in line
    assert "--id-field ''" in line
    assert main(command) == 3, "the same command, run again, says so again"
    assert "nothing to do" in capsys.readouterr().out
    assert main([*command, "--max-dead-letters", "0.75"]) == 0


def test_the_remedy_that_the_message_names_helps(tmp_path: Path) -> None:
    command = arguments(numbered_files(tmp_path / "corpus"), tmp_path / "out", "--id-field", "")
    assert main(command) == 0
    assert read_manifest(str(tmp_path / "out")).totals["num_documents"] == 100


def test_everything_lost_is_not_success_and_few_losses_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = small_corpus(tmp_path / "bad", a=[b"{\n" * 3, b'{"text": 1}\n'])
    assert main(arguments(bad, tmp_path / "none")) == 3
    error = capsys.readouterr().err
    assert "no document can be used, so no dataset is made: bad_json 3 " in error
    left = {path.name for path in (tmp_path / "none").iterdir()}
    assert left == {"tokenizers", "dead_letters.jsonl"}, "so other options may follow"
    assert "bad_json 3 (first: a.jsonl line 1: unexpected end of data" in error
    assert "text_not_a_string 1 (first: a.jsonl line 4: " in error
    assert "--id-field" not in error
    lines = [*(json_line(n, f"text {n}") for n in range(99)), b"{\n"]
    command = arguments(small_corpus(tmp_path / "good", a=lines), tmp_path / "out")
    assert main(command) == 0
    assert main([*command, "--max-dead-letters=0"]) == 3
    assert main([*command, "--keep-text", f"--output={tmp_path / 'none'}"]) == 0


@pytest.mark.parametrize("share", ["1.5", "-1", "nan"])
def test_no_shares(share: str) -> None:
    with pytest.raises(OptionsError, match=r"--max-dead-letters \S+ is not in 0 \.\. 1"):
        parse_options(["--input=a", "--output=b", f"--max-dead-letters={share}"])
