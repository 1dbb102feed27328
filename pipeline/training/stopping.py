"""SIGTERM, Ctrl-C and a terminal that goes (SIGHUP) let a run finish its step and save."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class RunStoppedError(KeyboardInterrupt):
    """A signal ended a run before its last step, with a checkpoint.

    `signal_number` is this process's signal; SIGTERM if another process got one.
    """

    def __init__(self, step: int, signal_number: int | None) -> None:
        """Keep the checkpoint's step."""
        super().__init__(
            f"stopped after step {step}, with a checkpoint; run the same command again to continue"
        )
        self.step = step
        self.signal_number = signal_number or signal.SIGTERM


class StopRequest:
    """The signal that asked this process to stop; None: not yet."""

    signal_number: int | None = None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_number = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
        with suppress(OSError):  # its terminal may be gone
            print(
                f"stopping after this step, with a checkpoint{again}", file=sys.stderr, flush=True
            )


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Record SIGTERM, SIGHUP and the first Ctrl-C instead of ending; main thread only.

    SIGHUP stays ignored under nohup.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    earlier = {number: signal.getsignal(number) for number in _SIGNALS}
    if earlier[signal.SIGHUP] == signal.SIG_IGN:
        del earlier[signal.SIGHUP]
    for number in earlier:
        signal.signal(number, request._note)
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
