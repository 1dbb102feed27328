"""Loops over tokens, compiled with numba and cached on disk."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

logger = logging.getLogger(__name__)


def compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for the types of its first call; it runs without the GIL.

    Unlike with numba's `cache=True`, damaged code is compiled again, and without a writable folder
    each process compiles.
    """
    return _kept(function, njit(nogil=True)(function))


def compiled_in_place[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that makes no array, nor calls one that does; else as `compiled`.

    numba then skips reference counts, four tenths of the time of small functions called per token.
    """
    # An option that numba documents with `register_jitable`, and its types lack.
    decorator: Any = njit(nogil=True, _nrt=False)  # type: ignore[call-overload]
    return _kept(function, decorator(function))


def _kept[**P, R](function: Callable[P, R], dispatcher: Any) -> Callable[P, R]:
    kernel: Callable[P, R] = dispatcher
    if kernel is function:  # NUMBA_DISABLE_JIT
        return kernel
    with suppress(RuntimeError):  # neither folder can be written
        dispatcher._cache = _Cache(function)  # type: ignore[no-untyped-call]
    dispatcher.compile = _interrupted_later()(dispatcher.compile)
    return kernel


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Hold Ctrl-C in the main thread: LLVM calls Python back through ctypes, which drops errors."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


class _Cache(FunctionCache):
    """numba's cache on disk, whose failures are misses."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:  # unpickling altered bytes may raise anything
            logger.info("compiling %s again: its cached code is damaged: %r", self._name, error)
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]  # a damaged index would fail again when it is added to
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except Exception as error:  # a full disk, or an index that was damaged meanwhile
            logger.info("%s is compiled by each process: %r", self._name, error)
