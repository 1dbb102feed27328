"""The live bar and the counters behind it."""

import io
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from beam_jobs.running import job_progress
from beam_jobs.running.job_progress import (
    WorkerProgress,
    aligning_stage,
    reset_progress,
    run_with_bar,
    scoring_stage,
    total_counts,
    worker_progress,
)
from tests.support.corpus import fail


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_adds_up_over_workers(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, second = WorkerProgress(folder), WorkerProgress(folder)
    first.add(read_documents=2, read_bytes=10)
    second.add(read_documents=3, student_tokens=7)
    second.add(aligned_documents=1)
    second.flush()
    told = {"read_bytes": 10, "read_documents": 5, "aligned_documents": 1, "student_tokens": 7}
    assert total_counts(folder) == told
    reset_progress(folder)
    assert total_counts(folder) == {}


def test_a_process_has_one_counter_for_a_run(tmp_path: Path) -> None:
    first = worker_progress(str(tmp_path))
    assert worker_progress(str(tmp_path)) is first
    reset_progress(str(tmp_path))
    assert worker_progress(str(tmp_path)) is not first


def test_a_worker_that_outlives_the_run_does_not_fail(tmp_path: Path) -> None:
    progress = WorkerProgress(str(tmp_path / "gone"))
    progress.add(read_documents=1)
    progress.flush()
    assert not (tmp_path / "gone").exists()


def test_the_bar_ends_where_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        run_with_bar(str(tmp_path), fail, stage=partial(aligning_stage, text_bytes=1))


@pytest.mark.parametrize(("quiet", "terminal"), [(False, False), (False, True), (True, False)])
def test_a_bar_on_a_terminal_and_a_line_now_and_then_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool, terminal: bool
) -> None:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(job_progress, "HEARTBEAT_SECONDS", 0.0)
    worker = WorkerProgress(str(tmp_path))
    aligning = partial(aligning_stage, text_bytes=2_000_000)
    for counts, stage in (
        ({"read_documents": 4000, "read_bytes": 1_500_000}, aligning),
        ({"aligned_documents": 1000, "student_tokens": 200}, aligning),
        ({"scored_tokens": 5000}, partial(scoring_stage, num_tokens=10_000)),
    ):

        def work(counts: dict[str, int] = counts) -> None:
            worker.add(**counts)
            worker.flush()

        run_with_bar(str(tmp_path), work, stage=stage, quiet=quiet)
    lines = re.split(r"[\r\n]+", screen.getvalue().strip())
    told = (
        r"reading: +75%\|.*\| 1\.50M/2\.00M \[.*B/s",
        r"aligning: +25%\|.*\| 1\.00k/4\.00k \[.* student tokens/s",
        r"scoring: +50%\|.*\| 5\.00k/10\.0k \[.* teacher tokens/s",
    )
    for pattern in ("^$",) if quiet else told:
        assert any(re.search(pattern, line) for line in lines), lines
    assert terminal or len(lines) == (1 if quiet else 3)
