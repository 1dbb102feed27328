"""Evaluate conditions in a process with limited memory and time.

DuckDB neither counts nor interrupts `list_sum(range(10000000000))`.
"""

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.conditions import ConditionQuery, WhereError, open_database

LIMIT_SECONDS = 60.0
"""Limit of one question, such as a shard's matching documents: usually 10 ms."""
LIMIT_BYTES = 4 << 30
"""Address space that the process may add after its start."""

_START = (
    # Ctrl-C ends it without a traceback: the parent says what there is to say.
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pipeline.dataset.condition_process import serve; serve(int(sys.argv[2]))"
)
_children: dict[int, "subprocess.Popen[bytes]"] = {}
"""By parent process: a forked one starts its own."""
_lock = Lock()


class LimitedQuery:
    """A `ConditionQuery` in another process."""

    def __init__(self, table: pa.Table) -> None:
        """Serialise the table."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        self._table = sink.getvalue().to_pybytes()

    def require_condition(self, where: str) -> frozenset[str]:
        """Check a condition; return its columns."""
        return self._ask("require_condition", where, frozenset[str])

    def find_paths(self, where: str) -> list[tuple[int, str, str]]:
        """Find two-part names."""
        return self._ask("find_paths", where, list[tuple[int, str, str]])

    def decide(self, where: str) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Evaluate a checked condition."""
        true, null = self._ask("decide", where, tuple[bytes, bytes])
        return np.frombuffer(true, np.bool_), np.frombuffer(null, np.bool_)

    def _ask[Value](self, method: str, where: str, kind: type[Value]) -> Value:
        try:
            question = msgspec.json.encode([method, where, self._table])
        except UnicodeEncodeError as error:
            raise WhereError(f"where {where!a}: it is not valid UTF-8 ({error.reason})") from error
        with _lock:
            answer = _exchange(question)
        if not answer:
            raise WhereError(
                f"where {where}: it takes more than {LIMIT_SECONDS:g} s or {LIMIT_BYTES >> 20} MiB "
                "for the documents of a shard; write one that takes less"
            )
        value, told = msgspec.json.decode(answer, type=tuple[msgspec.Raw, list[str]])
        if not told:
            return msgspec.json.decode(value, type=kind)
        refusal = WhereError(told[0])
        refusal.__notes__ = told[1:]
        raise refusal


def serve(limit_bytes: int) -> None:
    """Print "ready", then answer questions from standard input."""
    with suppress(WhereError):  # without DuckDB, each answer is that error
        open_database()
    with suppress(OSError, ValueError):  # only Linux knows both
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        limit = limit_bytes + pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        method, where, table = msgspec.json.decode(line, type=tuple[str, str, bytes])
        value, told = None, list[str]()
        try:
            value = getattr(ConditionQuery(pa.ipc.open_stream(table).read_all()), method)(where)
        except WhereError as error:
            told = [str(error), *getattr(error, "__notes__", [])]
        print(msgspec.json.encode((value, told), enc_hook=bytes).decode(), flush=True)


def _exchange(question: bytes) -> bytes:
    """Return the answer, empty if a limit killed the process."""
    child = _children.get(os.getpid())
    if child is None or child.poll() is not None:  # ended by a signal to the terminal's processes
        command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), str(LIMIT_BYTES)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _children[os.getpid()] = child
        if _interruptible(child, b"") != b"ready\n":
            raise OSError(f"{sys.executable} could not be started to decide conditions")
    timer = Timer(LIMIT_SECONDS, child.kill)
    timer.start()
    try:
        answer = _interruptible(child, question + b"\n")
    finally:
        timer.cancel()
    if not answer:
        del _children[os.getpid()]
        child.wait()
    return answer


def _interruptible(child: "subprocess.Popen[bytes]", question: bytes) -> bytes:
    """Write a question, return the answer; Ctrl-C ends the process, whose answer is to no other."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(question)
            child.stdin.flush()
        return child.stdout.readline()
    except BaseException:
        child.kill()
        child.wait()
        raise
