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
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tqdm import tqdm

from beam_jobs import storage
from pipeline.drawing.formatting import format_bytes, format_count, format_duration, format_short

_WRITE_SECONDS = 0.3
_POLL_SECONDS = 0.3
PROGRESS_PREFIX = "progress-"

HEARTBEAT_SECONDS = 60.0
"""Between two lines where there is no terminal to draw a bar on."""


class WorkerProgress:
    """One process's counts for one run, written to the run's folder now and then."""

    def __init__(self, folder: str) -> None:
        """Count for the run whose folder this is; only local folders get a file."""
        self._path = storage.join(folder, f"{PROGRESS_PREFIX}{uuid.uuid4().hex}.json")
        self._is_local = storage.is_local(folder)
        self._counts: Counter[str] = Counter()
        self._next_write = 0.0
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to this process's counts.

        Args:
            counts: such as read_bytes (of text), read_documents, aligned_documents, student_tokens,
                scored_tokens, scored_documents, reused_tokens (of losses that were there already).
        """
        with self._lock:
            self._counts.update(counts)
            if time.monotonic() >= self._next_write:
                self._write()
                self._next_write = time.monotonic() + _WRITE_SECONDS

    def flush(self) -> None:
        """Write the counts now, at the end of a bundle."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if not self._is_local:
            return
        partial = f"{self._path}.partial"
        try:
            with open(partial, "w") as file:
                json.dump(self._counts, file)
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


def total_counts(folder: str) -> Counter[str]:
    """Add up the counts of all workers of a run."""
    total: Counter[str] = Counter()
    for entry in os.scandir(folder):
        if entry.name.startswith(PROGRESS_PREFIX) and entry.name.endswith(".json"):
            with open(entry.path) as file:
                total.update(json.load(file))
    return total


def run_with_bar(
    folder: str, work: Callable[[], None], *, text_bytes: int, quiet: bool = False
) -> None:
    """Run `work` while a thread shows how much text is read, then how many documents are aligned.

    Args:
        folder: the run's folder, local.
        work: blocks until the job has ended.
        text_bytes: roughly how much text the input holds.
        quiet: show nothing.
    """

    def stage(counts: Counter[str]) -> _Stage:
        if done := counts["aligned_documents"]:
            total, tokens = counts["read_documents"], counts["student_tokens"]
            return _Stage("aligning", "aligned", done, total, "documents", tokens)
        done = counts["read_bytes"]
        return _Stage("reading", "read", done, max(text_bytes, done), _TEXT)

    _run_beside(folder, stage, work, quiet)


def run_with_token_bar(
    folder: str, work: Callable[[], None], *, num_tokens: int, quiet: bool = False
) -> None:
    """Run `work` while a thread shows how many of a dataset's teacher tokens are scored.

    Args:
        folder: the run's folder, local.
        work: blocks until the job has ended.
        num_tokens: of the dataset.
        quiet: show nothing.
    """

    def stage(counts: Counter[str]) -> _Stage:
        total = num_tokens - min(num_tokens, counts["reused_tokens"])
        # Bundles that run twice count twice; the bar must not overflow.
        done = min(total, counts["scored_tokens"])
        return _Stage("scoring", "scored", done, total, "teacher tokens")

    _run_beside(folder, stage, work, quiet)


_TEXT = "of text"


class _Stage(NamedTuple):
    """How far a job is: `done` of `total`, and the student tokens made meanwhile."""

    verb: str
    past: str
    done: int
    total: int
    what: str
    num_tokens: int = 0

    def speed(self, seconds: float) -> str:
        return f"{format_short(self.num_tokens / seconds)} student tokens/s"

    def line(self, seconds: float) -> str:
        """Return what is said of it `seconds` after its start."""
        show = format_bytes if self.what == _TEXT else format_count
        told = [f"{self.past} {show(self.done)} of {show(self.total)} {self.what}"]
        if self.done:
            left = seconds * (self.total - self.done) / self.done
            told.append(f"{format_duration(left)} left")
        if self.num_tokens:
            told.append(self.speed(seconds))
        return ", ".join(told)


def _run_beside(
    folder: str, stage: Callable[[Counter[str]], _Stage], work: Callable[[], None], quiet: bool
) -> None:
    finished = threading.Event()
    stages = map(stage, _poll(folder, finished))
    thread = threading.Thread(target=_draw, args=(stages, quiet), daemon=True)
    thread.start()
    try:
        work()
    finally:
        finished.set()
        thread.join()


def _poll(folder: str, finished: threading.Event) -> Iterator[Counter[str]]:
    """Yield the counts again and again, a last time at the end, or until the folder is gone."""
    yield Counter()
    is_last = False
    while not is_last:
        is_last = finished.wait(_POLL_SECONDS)
        try:
            counts = total_counts(folder)
        except FileNotFoundError:
            return
        yield counts


def _draw(stages: Iterator[_Stage], quiet: bool) -> None:
    """Show each stage: by a bar on a terminal, elsewhere by a line every minute."""
    is_lines = not quiet and not sys.stderr.isatty()
    started = began = time.monotonic()
    next_line = started + HEARTBEAT_SECONDS
    verb, bar = "", tqdm(disable=True)
    for stage in stages:
        now = time.monotonic()
        if verb != stage.verb:
            bar.close()
            verb, began = stage.verb, now - _POLL_SECONDS
            unit = "B" if stage.what == _TEXT else f" {stage.what}"
            bar = tqdm(desc=verb, unit=unit, unit_scale=True, dynamic_ncols=True,
                       disable=True if quiet else None)  # fmt: skip
        bar.total, bar.n = stage.total, stage.done
        if stage.num_tokens:
            bar.set_postfix_str(stage.speed(now - began), refresh=False)
        bar.refresh()
        if is_lines and stage.done and now >= next_line:
            told = stage.line(now - began)
            print(f"{format_duration(now - started)}: {told}", file=sys.stderr, flush=True)
            next_line = now + HEARTBEAT_SECONDS
    bar.close()
