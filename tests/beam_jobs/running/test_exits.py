"""How a job's command ends by a signal, wherever Python is when it arrives."""

import signal
import threading
import weakref
from collections.abc import Callable

import pytest

from beam_jobs.running.exits import RESUME, exit_status
from pipeline.command_line import termination

SIGNALS = [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "the terminal is gone")]


class Thing:
    """What a weak reference can name."""


def in_a_callback(number: int) -> None:
    """Arrive where nothing can be raised."""
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(number))
    del thing
    assert reference() is None


def in_a_bare_except(number: int) -> None:
    """Arrive in a library that catches everything."""
    try:
        signal.raise_signal(number)
    except BaseException:
        return
    raise AssertionError("the signal raised nothing")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("number", "status", "how"), SIGNALS)
@pytest.mark.parametrize("lose", [in_a_callback, in_a_bare_except])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_signal_that_is_lost_ends_the_command(
    lose: Callable[[int], None],
    goes_on: bool,
    number: int,
    status: int,
    how: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(termination, "_AGAIN_SECONDS", 0.02 if goes_on else 60)
    before = signal.getsignal(number)
    cleaned: list[bool] = []

    def work() -> None:
        lose(number)
        try:
            assert not goes_on or threading.Event().wait(60)
        finally:
            cleaned.append(True)

    assert exit_status("align", work) == status
    assert cleaned == [True]
    assert capsys.readouterr().err.splitlines()[-1] == f"vocag align: {how}; {RESUME}"
    assert signal.getsignal(number) == before


def test_a_failure_after_a_signal_is_the_signal_s() -> None:
    def work() -> None:
        in_a_bare_except(signal.SIGTERM)
        raise ValueError("the pipeline was cancelled")

    assert exit_status("align", work) == 143


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As nohup starts a command."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert exit_status("align", lambda: signal.raise_signal(signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_signal_does_not_cut_the_end_short() -> None:
    """As a service manager sends SIGTERM and SIGHUP to all of a job's processes."""
    cleaned: list[bool] = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)

    assert exit_status("align", work) == 143
    assert cleaned == [True]
