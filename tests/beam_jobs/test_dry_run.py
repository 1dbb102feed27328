"""What a job would do, told beforehand and compared with what it does."""

import re
from pathlib import Path

import pytest

from beam_jobs.align.command import main
from pipeline.dataset.reading import read_manifest
from tests.support.corpus import align_options, command_line, reference_dataset


def shown(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Return what a dry run says."""
    capsys.readouterr()
    assert main([*arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_dry_run_tells_what_the_job_then_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, reference = reference_dataset()
    output = tmp_path / "out"
    said = shown(capsys, command_line(align_options(corpus, output)))
    assert not output.exists()
    assert "  input           9 files (2 jsonl, 2 jsonl gzip, 2 text, 1 jsonl zstd, " in said
    totals = read_manifest(str(reference)).totals
    found = re.search(r"teacher .*; ([\d.]+) tokens a student token", said)
    assert found
    ratio = totals["num_teacher_tokens"] / totals["num_student_tokens"]
    assert float(found[1]) == pytest.approx(ratio, rel=0.05)
    found = re.search(r"([\d.]+) bytes a student token", said)
    assert found
    per_token = totals["num_bytes"] / totals["num_student_tokens"]
    assert float(found[1]) == pytest.approx(per_token, rel=0.1)
    assert re.search(r"disk +about [\d.]+ MB while it runs; .* are free at ", said)
    assert re.search(
        r"memory +about [\d.]+ [MG]B a process, 1 of them, and .+ more for a document as long as "
        r"--max-document-bytes allows \(.+\); this machine has",
        said,
    )
    assert re.search(r"time +about .* of aligning here", said)
    assert re.search(r"dead letters +\d+ of the first \d+ documents", said)
    assert "    a.jsonl#" in said
    assert "bad_json: " in said


def test_a_dry_run_says_why_the_fast_path_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, _ = reference_dataset()
    arguments = command_line(align_options(corpus, tmp_path / "out"))
    assert "student         fast path, " in shown(capsys, arguments)
    assert "student         reference path (" in shown(capsys, [*arguments, "--no-fast-path"])


def test_a_dry_run_refuses_what_the_job_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, reference = reference_dataset()
    arguments = command_line(align_options(corpus, reference))
    assert main([*arguments, "--dry-run", "--name=other"]) == 2
    assert "holds a dataset of another configuration" in capsys.readouterr().err
    assert main([*arguments, "--dry-run", "--id-field=ulr"]) == 2
