"""One job at a time in one output: on file systems, and in stores that know no locks."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from beam_jobs import locks, storage
from beam_jobs.align.command import align
from beam_jobs.job_errors import OptionsError
from beam_jobs.locks import OUTPUT_LOCK, STALE_SECONDS, hold_lock, hold_remote
from tests.support.corpus import align_options, reference_dataset

OURSELVES = rf"process {os.getpid()} on {socket.gethostname()}, started 20\d\d-.* UTC, writes to"


@pytest.fixture
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_SETTLE_SECONDS", 0.0)


def test_a_job_is_refused_where_another_one_writes(tmp_path: Path) -> None:
    corpus, _ = reference_dataset()
    with hold_lock(str(tmp_path / OUTPUT_LOCK), str(tmp_path)):
        with pytest.raises(OptionsError, match=rf"{OURSELVES} {tmp_path}; wait until"):
            align(align_options(corpus, tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == [OUTPUT_LOCK]


@pytest.mark.usefixtures("no_settling")
@pytest.mark.parametrize("hold", [hold_lock, hold_remote])
def test_a_lock_is_held_by_one_and_leaves_nothing(tmp_path: Path, hold: Any) -> None:
    path = str(tmp_path / OUTPUT_LOCK)
    for _ in range(2):
        with hold(path, "out"):
            with pytest.raises(OptionsError, match=rf"{OURSELVES} out; wait until it"):
                hold(path, "out").__enter__()
            assert os.path.exists(path)
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_local_lock_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / OUTPUT_LOCK
    program = (
        "import os, signal, sys; from beam_jobs.locks import hold_lock\n"
        "with hold_lock(sys.argv[1], 'out'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    dead = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert dead.returncode == -9
    assert path.exists()
    with hold_lock(str(path), "out"):
        assert json.loads(path.read_text())["process"] == os.getpid()


def write_lock(path: Path, **changes: object) -> None:
    now = time.time()
    owner = {"id": "theirs", "process": 1, "host": "elsewhere", "started": now, "renewed": now}
    path.write_text(json.dumps({**owner, **changes}))


@pytest.mark.usefixtures("no_settling")
def test_a_remote_lock_is_believed_while_it_is_renewed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    write_lock(path)
    message = r"process 1 on elsewhere, .* if that job was killed, this command works \d+ s from"
    with pytest.raises(OptionsError, match=message):
        hold_remote(str(path), "out").__enter__()
    write_lock(path, renewed=time.time() + 3600)  # a clock that was set back since
    with pytest.raises(OptionsError, match=rf"works {STALE_SECONDS:.0f} s from now"):
        hold_remote(str(path), "out").__enter__()


@pytest.mark.usefixtures("no_settling")
def test_a_remote_lock_that_looks_expired_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock two minutes ahead took over the lock of a job that lives."""
    path, expired = tmp_path / "lock", time.time() - STALE_SECONDS - 1
    write_lock(path, renewed=expired)
    slept = "beam_jobs.locks.time.sleep"
    monkeypatch.setattr(slept, lambda _: write_lock(path, renewed=expired + 15))
    with pytest.raises(OptionsError, match=rf"elsewhere, .* works {STALE_SECONDS:.0f} s from now"):
        hold_remote(str(path), "out").__enter__()
    assert json.loads(path.read_text())["id"] == "theirs"
    write_lock(path, renewed=expired)
    monkeypatch.setattr(slept, lambda _: None)
    with hold_remote(str(path), "out"):
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert "process 1 on elsewhere" in caplog.text
    assert "unless it gives one within 30 s" in caplog.text


@pytest.mark.usefixtures("no_settling")
def test_a_remote_lock_that_can_not_be_read_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    write_lock(path)

    def refuse(_: str) -> bytes:
        raise PermissionError(13, "Forbidden", str(path))

    monkeypatch.setattr("beam_jobs.locks.storage.read_bytes", refuse)
    with pytest.raises(PermissionError, match="Forbidden"):
        hold_remote(str(path), "out").__enter__()
    assert json.loads(path.read_text())["id"] == "theirs"


@pytest.mark.usefixtures("no_settling")
def test_a_remote_lock_that_goes_while_it_is_read_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "lock", storage.read_bytes
    write_lock(path)

    def goes(name: str) -> bytes:
        monkeypatch.setattr("beam_jobs.locks.storage.read_bytes", read)
        path.unlink()
        return read(name)

    monkeypatch.setattr("beam_jobs.locks.storage.read_bytes", goes)
    with hold_remote(str(path), "out"):
        assert json.loads(path.read_text())["process"] == os.getpid()


@pytest.mark.slow
@pytest.mark.usefixtures("no_settling")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't show it")
def test_a_remote_lock_of_an_ended_process_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed, and even not yet noticed by its parent, which doesn't know for how long it waits."""
    path = tmp_path / "lock"
    child = os.fork()
    if not child:
        with hold_remote(str(path), "out"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    owner = json.loads(path.read_text())
    with hold_remote(str(path), "out"):
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert f"process {child} on {owner['host']}" in caplog.text
    os.waitpid(child, 0)
    assert locks._has_ended(owner)
    # Its number is another's now; the same number elsewhere says nothing of it.
    assert locks._has_ended(owner | {"process": os.getpid()})
    owner["seen"][1] = "another container"
    write_lock(path, **owner)
    with pytest.raises(OptionsError, match=f"process {child} .* works \\d+ s from now"):
        hold_remote(str(path), "out").__enter__()


@pytest.mark.usefixtures("no_settling")
@pytest.mark.parametrize("error", [PermissionError, None])
def test_a_process_that_lives_or_can_not_be_seen_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None
) -> None:
    path = str(tmp_path / "lock")

    def kill(process: int, number: int) -> None:
        if error is not None:
            raise error

    with hold_remote(path, "out"):
        monkeypatch.setattr(locks.os, "kill", kill)  # type: ignore[attr-defined]
        with pytest.raises(OptionsError, match=f"{OURSELVES} out"):
            hold_remote(path, "out").__enter__()


def test_the_last_to_write_has_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody has one that is gone: a job that ended just then took it for its own."""
    path = tmp_path / "lock"
    monkeypatch.setattr("beam_jobs.locks.time.sleep", lambda _: write_lock(path))
    with pytest.raises(OptionsError, match="process 1 on elsewhere"):
        hold_remote(str(path), "out").__enter__()
    assert json.loads(path.read_text())["id"] == "theirs"
    path.unlink()
    monkeypatch.setattr(locks.time, "sleep", lambda _: path.unlink())  # type: ignore[attr-defined]
    with pytest.raises(OptionsError, match="another job writes to out"):
        hold_remote(str(path), "out").__enter__()


@pytest.mark.usefixtures("no_settling")
def test_a_store_that_fails_once_does_not_end_the_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, write, calls, renewed = tmp_path / "lock", locks._write, [], threading.Event()

    def fails_at_first(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # the first isn't a renewal
            raise RuntimeError("503 Service Unavailable")
        write(*arguments)
        if len(calls) > 2:
            renewed.set()

    monkeypatch.setattr(locks, "_write", fails_at_first)
    monkeypatch.setattr(locks, "RENEW_SECONDS", 0.01)
    with hold_remote(str(path), "out"):
        assert renewed.wait(30)
    assert "could not be renewed; trying again: 503" in caplog.text
    assert not path.exists()
