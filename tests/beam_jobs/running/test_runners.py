"""How a runner's failure is told."""

import tempfile
from functools import partial
from pathlib import Path

import apache_beam as beam
import pytest

from beam_jobs.job_errors import JobError
from beam_jobs.running.exits import RESUME
from beam_jobs.running.job_progress import aligning_stage
from beam_jobs.running.run_options import RunOptions
from beam_jobs.running.runners import make_beam_options, run_pipeline
from pipeline.command_line.failures import hints_of

IN_A_WORKER = """Traceback (most recent call last):
  File "devices.py", line 30, in find_device
ValueError: device=cuda: no GPU
hint: device=cpu

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "common.py", line 1512, in process
ValueError: device=cuda: no GPU [while running 'Score']
"""


@pytest.mark.parametrize(
    ("report", "told", "resumes", "hints"),
    [
        (IN_A_WORKER, "ValueError: device=cuda: no GPU", False, ["hint: device=cpu"]),
        ("a lost disk", "a lost disk", True, []),
        ("it was cut: run the same command again", "it was cut", False, []),
    ],
)
def test_only_what_resuming_may_mend_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: str,
    told: str,
    *,
    resumes: bool,
    hints: list[str],
) -> None:
    """A worker process's error is text, its hint among it."""

    def fail(_: beam.Pipeline) -> None:
        raise RuntimeError(report)

    monkeypatch.setattr(beam.Pipeline, "run", fail)
    options, stage = make_beam_options([]), partial(aligning_stage, text_bytes=1)
    with pytest.raises(JobError) as raised:
        run_pipeline(
            lambda _: None, options, str(tmp_path), run=RunOptions(quiet=True), stage=stage
        )
    assert str(raised.value).startswith(f"the job failed: {told}")
    assert str(raised.value).endswith(RESUME) == resumes
    assert hints_of(raised.value) == hints


def test_an_abandoned_job_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beam's own, which its thread would have removed: each Ctrl-C left one."""

    def interrupt(_: beam.Pipeline) -> None:
        raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(beam.Pipeline, "run", interrupt)
    stage = partial(aligning_stage, text_bytes=1)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(
            lambda _: None,
            make_beam_options([]),
            str(tmp_path),
            run=RunOptions(quiet=True),
            stage=stage,
        )
    assert not list((tmp_path / "temporary").iterdir())
