"""The live bar of a local run, and the counters that workers leave for it.

Each worker process keeps one small file of running totals in the run's folder; the launcher adds
them up. They are for eyes only: bundles that run twice count twice. What is reported at the end
comes from the committed records.
"""

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from tqdm import tqdm

from beam_jobs import storage
from pipeline.drawing.formatting import format_bytes, format_count, format_duration, format_short

_WRITE_SECONDS = 0.3
_POLL_SECONDS = 0.3
PROGRESS_PREFIX = "progress-"

HEARTBEAT_SECONDS = 60.0
"""Between two lines where there is no terminal to draw a bar on."""


@dataclass
class Counts:
    """What was done so far, by one worker or by all."""

    read_bytes: int = 0  # of text
    read_documents: int = 0
    aligned_documents: int = 0
    student_tokens: int = 0
    scored_tokens: int = 0
    scored_documents: int = 0
    reused_tokens: int = 0  # of shards that an earlier run has scored

    def add(self, other: "Counts") -> None:
        """Add another worker's counts."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))


class WorkerProgress:
    """One process's counts for one run, written to the run's folder now and then."""

    def __init__(self, folder: str) -> None:
        """Count for the run whose folder this is; only local folders get a file."""
        self._path = storage.join(folder, f"{PROGRESS_PREFIX}{uuid.uuid4().hex}.json")
        self._is_local = storage.is_local(folder)
        self._counts = Counts()
        self._next_write = 0.0
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to this process's counts."""
        with self._lock:
            self._counts.add(Counts(**counts))
            if self._is_local and time.monotonic() >= self._next_write:
                self._write()
                self._next_write = time.monotonic() + _WRITE_SECONDS

    def flush(self) -> None:
        """Write the counts now, at the end of a bundle."""
        with self._lock:
            if self._is_local:
                self._write()

    def _write(self) -> None:
        partial = f"{self._path}.partial"
        try:
            with open(partial, "w") as file:
                json.dump(asdict(self._counts), file)
            os.replace(partial, self._path)
        except FileNotFoundError:  # the run has ended and its folder is gone
            self._is_local = False


_workers: dict[str, WorkerProgress] = {}
_workers_lock = threading.Lock()


def worker_progress(folder: str) -> WorkerProgress:
    """Return this process's counter for a run."""
    with _workers_lock:
        return _workers.setdefault(folder, WorkerProgress(folder))


def reset_progress(folder: str) -> None:
    """Forget the counts of an earlier attempt at a run."""
    with _workers_lock:
        _workers.pop(folder, None)
    storage.delete_files(
        folder, [n for n in storage.list_folder(folder) if n.startswith(PROGRESS_PREFIX)]
    )


def total_counts(folder: str) -> Counts:
    """Add up the counts of all workers of a run."""
    total = Counts()
    for entry in os.scandir(folder):
        if entry.name.startswith(PROGRESS_PREFIX) and entry.name.endswith(".json"):
            with open(entry.path) as file:
                total.add(Counts(**json.load(file)))
    return total


def run_with_bar(
    folder: str, work: Callable[[], None], *, text_bytes: int, quiet: bool = False
) -> None:
    """Run `work` while a thread shows the progress of the run's workers.

    Args:
        folder: the run's folder, local.
        work: blocks until the job has ended.
        text_bytes: roughly how much text the input holds.
        quiet: show nothing.
    """
    _run_beside(partial(_draw, folder, text_bytes, _Screen(quiet)), work)


def run_with_token_bar(
    folder: str,
    work: Callable[[], None],
    *,
    num_tokens: int,
    quiet: bool = False,
    verbs: tuple[str, str] = ("scoring", "scored"),
    side: str = "teacher",
) -> None:
    """Run `work` while a thread shows how many of a dataset's tokens are done.

    Args:
        folder: the run's folder, local.
        work: blocks until the job has ended.
        num_tokens: of the dataset.
        quiet: show nothing.
        verbs: what is done with them, and was.
        side: whose tokens they are.
    """
    draw = partial(_draw_tokens, folder, num_tokens, _Screen(quiet), verbs, f"{side} tokens")
    _run_beside(draw, work)


class _Screen:
    """Where progress is shown: a bar on a terminal, elsewhere a line every minute."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._has_lines = not quiet and not sys.stderr.isatty()
        self._started = time.monotonic()
        self._next_line = self._started + HEARTBEAT_SECONDS

    def bar(self, verb: str, unit: str, total: int) -> Any:
        """Return a bar on stderr; nothing is drawn where that is no terminal."""
        return tqdm(
            total=total, unit=unit, unit_scale=True, desc=verb, dynamic_ncols=True,
            disable=True if self._quiet else None,
        )  # fmt: skip

    def beat(self, line: Callable[[], str]) -> None:
        """Print a line if it is time for one."""
        if self._has_lines and time.monotonic() >= self._next_line:
            elapsed = format_duration(time.monotonic() - self._started)
            print(f"{elapsed}: {line()}", file=sys.stderr, flush=True)
            self._next_line = time.monotonic() + HEARTBEAT_SECONDS


def _run_beside(draw: Callable[[threading.Event], None], work: Callable[[], None]) -> None:
    finished = threading.Event()
    thread = threading.Thread(target=draw, args=(finished,), daemon=True)
    thread.start()
    try:
        work()
    finally:
        finished.set()
        thread.join()


def _poll(folder: str, finished: threading.Event) -> Iterator[Counts]:
    """Yield the counts again and again, a last time at the end, or until the folder is gone."""
    is_last = False
    while not is_last:
        is_last = finished.wait(_POLL_SECONDS)
        try:
            counts = total_counts(folder)
        except FileNotFoundError:
            return
        yield counts


def _draw(folder: str, text_bytes: int, screen: _Screen, finished: threading.Event) -> None:
    bar = screen.bar("reading", "B", text_bytes)
    started = None
    for counts in _poll(folder, finished):
        if counts.aligned_documents and started is None:
            started = time.monotonic() - _POLL_SECONDS
            bar.close()
            bar = screen.bar("aligning", " documents", counts.read_documents)
        if started is None:
            bar.total, bar.n = max(text_bytes, counts.read_bytes), counts.read_bytes
            screen.beat(partial(_describe_reading, counts, text_bytes))
        else:
            seconds = time.monotonic() - started
            speed = counts.student_tokens / seconds
            bar.total, bar.n = counts.read_documents, counts.aligned_documents
            bar.set_postfix_str(f"{speed / 1e6:.2f} M student tokens/s", refresh=False)
            screen.beat(partial(_describe_aligning, counts, seconds))
        bar.refresh()
    bar.close()


def _draw_tokens(
    folder: str,
    num_tokens: int,
    screen: _Screen,
    verbs: tuple[str, str],
    what: str,
    finished: threading.Event,
) -> None:
    bar = screen.bar(verbs[0], " tokens", num_tokens)
    started = time.monotonic()
    for counts in _poll(folder, finished):
        # Bundles that run twice count twice; the bar must not overflow.
        bar.total = num_tokens - min(num_tokens, counts.reused_tokens)
        bar.n = min(bar.total, counts.scored_tokens)
        bar.set_postfix_str(f"{counts.scored_documents} documents", refresh=False)
        seconds = time.monotonic() - started
        screen.beat(partial(_describe_share, verbs[1], bar.n, bar.total, what, seconds))
        bar.refresh()
    bar.close()


def _describe_reading(counts: Counts, text_bytes: int) -> str:
    return (
        f"read {format_bytes(counts.read_bytes)} of about {format_bytes(text_bytes)} of text, "
        f"{format_count(counts.read_documents)} documents"
    )


def _describe_aligning(counts: Counts, seconds: float) -> str:
    done, total = counts.aligned_documents, counts.read_documents
    share = _describe_share("aligned", done, total, "documents", seconds)
    return f"{share}, {format_short(counts.student_tokens / seconds)} student tokens/s"


def _describe_share(verb: str, done: int, total: int, what: str, seconds: float) -> str:
    left = f", {format_duration(seconds * (total - done) / done)} left" if done else ""
    return f"{verb} {format_count(done)} of {format_count(total)} {what}{left}"
