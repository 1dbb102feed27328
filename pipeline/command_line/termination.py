"""SIGTERM and SIGHUP end a command as Ctrl-C does: by an exception, so that it cleans up."""

import os
import signal
import threading
from contextlib import contextmanager

TYPE_CHECKING = False  # typing's own, whose import takes as long as the rest of `vocag --help`
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_AGAIN_SECONDS = 5.0
"""After a signal; a job's clean-up takes less."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; only a command's end catches it."""

    def __init__(self, number: int) -> None:
        """Take the signal."""
        self.how = "the terminal is gone" if number == signal.SIGHUP else "terminated"
        self.status = 128 + number


@contextmanager
def terminate_by_exception() -> "Iterator[None]":
    """Let SIGTERM and SIGHUP raise `Terminated` in the main thread, even if Python loses it.

    A handler may run where nothing can be raised, such as a weak reference's callback, and
    libraries have bare `except:`. So the signal is sent again until the block ends; others' signals
    are ignored meanwhile. SIGHUP stays ignored under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    ended, again = threading.Event(), threading.Event()

    def terminate(number: int, _frame: "FrameType | None") -> None:
        if not arrived:
            arrived.append(number)
            threading.Thread(target=_repeat, args=(number, ended, again), daemon=True).start()
        elif not again.is_set():
            return
        again.clear()
        raise Terminated(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, terminate)
        try:
            yield
        finally:
            if arrived:
                raise Terminated(arrived[0])
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _repeat(number: int, ended: threading.Event, again: threading.Event) -> None:
    while not ended.wait(_AGAIN_SECONDS):
        again.set()
        os.kill(os.getpid(), number)
