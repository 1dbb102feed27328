"""The live bar and the counters behind it."""

import io
import re
import sys
from pathlib import Path

import pytest

from beam_jobs.running import progress
from beam_jobs.running.progress import (
    WorkerProgress,
    reset_progress,
    run_with_bar,
    run_with_token_bar,
    total_counts,
    worker_progress,
)


class Terminal(io.StringIO):
    """What the bar takes for a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_adds_up_over_workers(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, second = WorkerProgress(folder), WorkerProgress(folder)
    first.add(read_documents=2, read_bytes=10)
    second.add(read_documents=3, student_tokens=7)
    second.add(aligned_documents=1)
    second.flush()
    assert total_counts(folder) == {
        "read_bytes": 10,
        "read_documents": 5,
        "aligned_documents": 1,
        "student_tokens": 7,
    }
    reset_progress(folder)
    assert total_counts(folder) == {}


def test_a_process_has_one_counter_for_a_run_until_it_starts_again(tmp_path: Path) -> None:
    first = worker_progress(str(tmp_path))
    assert worker_progress(str(tmp_path)) is first
    reset_progress(str(tmp_path))
    assert worker_progress(str(tmp_path)) is not first


def test_a_worker_that_outlives_the_run_does_not_fail(tmp_path: Path) -> None:
    progress = WorkerProgress(str(tmp_path / "gone"))
    progress.add(read_documents=1)
    progress.flush()
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_shows_both_stages_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)

    def work() -> None:
        worker = WorkerProgress(str(tmp_path))
        worker.add(read_documents=3, read_bytes=900, aligned_documents=3, student_tokens=200)
        worker.flush()

    run_with_bar(str(tmp_path), text_bytes=1000, work=work)
    shown = screen.getvalue()
    assert ("reading" in shown) == terminal
    assert ("aligning: 100%" in shown) == terminal
    assert ("student tokens/s" in shown) == terminal


def test_the_bar_ends_where_the_work_fails(tmp_path: Path) -> None:
    def work() -> None:
        raise RuntimeError("the work failed")

    with pytest.raises(RuntimeError, match="the work failed"):
        run_with_bar(str(tmp_path), text_bytes=1, work=work)


@pytest.mark.parametrize(("quiet", "terminal"), [(False, False), (False, True), (True, False)])
def test_a_line_now_and_then_says_how_far_it_is_where_no_bar_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool, terminal: bool
) -> None:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.0)
    worker = WorkerProgress(str(tmp_path))

    def read() -> None:
        worker.add(read_documents=4000, read_bytes=1_500_000)
        worker.flush()

    def align() -> None:
        worker.add(aligned_documents=1000, student_tokens=200)
        worker.flush()

    def score() -> None:
        worker.add(scored_tokens=5000)
        worker.flush()

    run_with_bar(str(tmp_path), text_bytes=2_000_000, work=read, quiet=quiet)
    run_with_bar(str(tmp_path), text_bytes=2_000_000, work=align, quiet=quiet)
    run_with_token_bar(str(tmp_path), num_tokens=10_000, work=score, quiet=quiet)
    lines = screen.getvalue().splitlines()
    if quiet:
        assert lines == []
    elif not terminal:
        first, second, third = lines
        assert re.search(r"s: read 1\.50 MB of 2\.00 MB of text, .* left$", first)
        assert re.search(r"s: aligned 1,000 of 4,000 documents, .* left, .* student tok", second)
        assert re.search(r"s: scored 5,000 of 10,000 teacher tokens, .* left$", third)
