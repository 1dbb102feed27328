"""Worker processes of this machine: what happens to a job whose workers die, or that is stopped."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from beam_jobs.align.command import align
from beam_jobs.align.options import parse_options
from beam_jobs.job_errors import OptionsError
from beam_jobs.running.exits import RESUME
from beam_jobs.running.run_options import RunOptions
from beam_jobs.running.runners import describe_runner, make_beam_options
from tests.support.corpus import align_options, command_line, digests, reference_dataset
from tests.support.killing import processes_that_name, require_ended

IN_A_WORKER = """
import sys
if "beam_jobs.running.workers" in " ".join(sys.orig_argv):
    import os, signal, threading
"""
IN_THE_LAUNCHER = """
import sys
if "beam_jobs.align" in sys.orig_argv:
    import os, signal, threading
"""
CALL_COUNTED = """
    from beam_jobs.align import {module}
    original, calls = {module}.{function}, []
    def counted(*arguments, **keywords):
        calls.append(1)
        if len(calls) == {call}:
            {action}
        return original(*arguments, **keywords)
    {module}.{function} = counted
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
IN_A_BATCH = {"module": "buckets", "function": "align_documents", "call": 9}


def run_align(output: Path, hook: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own; `hook` runs first in it and in its workers."""
    corpus, _ = reference_dataset()
    package = output.parent / "package"
    package.mkdir()
    (package / "sitecustomize.py").write_text(hook)
    return subprocess.run(
        [sys.executable, "-m", "beam_jobs.align", *command_line(align_options(corpus, output)),
         *arguments],
        env={**os.environ, "PYTHONPATH": f"{package}:{os.getcwd()}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # Tests that run in a shell's background inherit a SIGINT that is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def our_lines(stderr: str) -> list[str]:
    """Return what the command says, without what Beam says when it is imported."""
    return [line for line in stderr.splitlines() if not line.startswith("WARNING:root:apitools")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (CALL_COUNTED.format(**IN_A_BATCH, action=DIE), r"was killed \(SIGKILL\): by hand, or"),
        ("    sys.exit('no such library')", "ended with status 1: SystemExit: no such library"),
    ],
)
def test_a_dead_worker_ends_the_job_which_then_goes_on(
    tmp_path: Path, hook: str, reason: str
) -> None:
    output = tmp_path / "out"
    done = run_align(output, IN_A_WORKER + hook, "--workers=2")
    assert done.returncode == 1
    (line,) = our_lines(done.stderr)
    expected = rf"vocag align: worker process [12] {reason}.* \(its log in .*\); {RESUME}"
    assert re.fullmatch(expected, line), line
    assert not processes_that_name(str(tmp_path))
    align(align_options(reference_dataset()[0], output))
    assert digests(output) == digests(reference_dataset()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "name", "status", "word"),
    [
        (1, "SIGTERM", 143, "terminated"),
        (2, "SIGHUP", 129, "the terminal is gone"),
        (2, "SIGINT", 130, "interrupted"),
    ],
)
def test_a_signal_ends_the_job_with_one_line_and_no_worker_left(
    tmp_path: Path, workers: int, name: str, status: int, word: str
) -> None:
    where, pid = (IN_THE_LAUNCHER, "getpid") if workers == 1 else (IN_A_WORKER, "getppid")
    mark = tmp_path / "sent"  # by the first of two workers
    send = f"os.path.exists({str(mark)!r}) or open({str(mark)!r}, 'w').close() or os.kill"
    stay = f"{send}(os.{pid}(), signal.{name}); threading.Event().wait()"
    hook = where + CALL_COUNTED.format(**IN_A_BATCH, action=stay)
    done = run_align(tmp_path / "out", hook, f"--workers={workers}")
    assert (done.returncode, our_lines(done.stderr)) == (status, [f"vocag align: {word}; {RESUME}"])
    assert not processes_that_name(str(tmp_path))
    left = [path.name for path in (tmp_path / "out").iterdir() if "lock" in path.name]
    assert left == []


@pytest.mark.slow
def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    stay = "os.kill(os.getppid(), signal.SIGKILL); threading.Event().wait()"
    hook = IN_A_WORKER + CALL_COUNTED.format(**IN_A_BATCH, action=stay)
    done = run_align(tmp_path / "out", hook, "--workers=2")
    assert (done.returncode, our_lines(done.stderr)) == (-signal.SIGKILL, [])
    require_ended(str(tmp_path))


def test_two_numbers_of_processes_are_refused_and_one_is_named() -> None:
    two = RunOptions(workers=2)
    assert describe_runner(make_beam_options([], run=two)) == "DirectRunner, 2 processes"
    assert describe_runner(make_beam_options([])) == "DirectRunner"
    for argument, message in (
        ("--runner=BundleBasedDirectRunner", "--runner BundleBasedDirectRunner has its own"),
        ("--direct_num_workers=3", "--workers 2 means the same as --direct_num_workers=3"),
    ):
        with pytest.raises(OptionsError, match=message):
            make_beam_options([argument], run=two)


def test_no_process_is_no_number_of_workers() -> None:
    with pytest.raises(OptionsError, match="--workers 0 is below 1"):
        parse_options(["--input=a", "--output=b", "--workers=0"])


@pytest.mark.slow
@pytest.mark.parametrize("libraries", ["torch._dynamo, triton", "duckdb"])
def test_a_process_leaves_without_a_word(libraries: str) -> None:
    pytest.importorskip(libraries.rpartition(", ")[2])
    script = (
        "from beam_jobs.running.exits import skip_last_collection\n"
        f"skip_last_collection()\nimport {libraries}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
