"""The live bar of a local run, and workers' counters for it.

Each worker keeps running totals in a file, only for display: bundles that run twice count twice.
"""

import io
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
from pipeline.drawing.formatting import format_short

_WRITE_SECONDS = 0.3
_POLL_SECONDS = 0.3
PROGRESS_PREFIX = "progress-"

HEARTBEAT_SECONDS = 60.0
"""Between two lines if there is no terminal to draw a bar on."""


class WorkerProgress:
    """One process's counts for a run, written now and then."""

    def __init__(self, folder: str) -> None:
        """Count for a folder's run; only local ones get a file."""
        self._path = storage.join(folder, f"{PROGRESS_PREFIX}{uuid.uuid4().hex}.json")
        self._is_local = storage.is_local(folder)
        self._counts: Counter[str] = Counter()
        self._next_write = 0.0
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to counts that stages read."""
        with self._lock:
            self._counts.update(counts)
            if time.monotonic() >= self._next_write:
                self._write()
                self._next_write = time.monotonic() + _WRITE_SECONDS

    def flush(self) -> None:
        """Write the counts."""
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
    """This process's counter for a run."""
    with _workers_lock:
        return _workers.setdefault(folder, WorkerProgress(folder))


def reset_progress(folder: str) -> None:
    """Forget an earlier attempt's counts."""
    with _workers_lock:
        _workers.pop(folder, None)
    storage.delete_files(
        folder, [n for n in storage.list_folder(folder) if n.startswith(PROGRESS_PREFIX)]
    )


def total_counts(folder: str) -> Counter[str]:
    """Add up all workers' counts."""
    total: Counter[str] = Counter()
    for entry in os.scandir(folder):
        if entry.name.startswith(PROGRESS_PREFIX) and entry.name.endswith(".json"):
            with open(entry.path) as file:
                total.update(json.load(file))
    return total


class JobStage(NamedTuple):
    """`done` of `total`, and student tokens so far."""

    verb: str
    done: int
    total: int
    unit: str
    num_tokens: int = 0


def aligning_stage(counts: Counter[str], *, text_bytes: int) -> JobStage:
    """Reading about `text_bytes` of text, then aligning documents."""
    if done := counts["aligned_documents"]:
        total, tokens = counts["read_documents"], counts["student_tokens"]
        return JobStage("aligning", done, total, " documents", tokens)
    done = counts["read_bytes"]
    return JobStage("reading", done, max(text_bytes, done), "B")


def scoring_stage(counts: Counter[str], *, num_tokens: int) -> JobStage:
    """Scoring `num_tokens` teacher tokens."""
    total = num_tokens - min(num_tokens, counts["reused_tokens"])
    # Bundles that run twice count twice; the bar must not overflow.
    return JobStage("scoring", min(total, counts["scored_tokens"]), total, " teacher tokens")


def run_with_bar(
    folder: str,
    work: Callable[[], None],
    *,
    stage: Callable[[Counter[str]], JobStage],
    quiet: bool = False,
) -> None:
    """Run `work` with progress: a bar, or a line a minute."""
    if quiet:
        work()
        return
    finished = threading.Event()
    stages = map(stage, _poll(folder, finished))
    thread = threading.Thread(target=_draw, args=(stages,), daemon=True)
    thread.start()
    try:
        work()
    finally:
        finished.set()
        thread.join()


def _poll(folder: str, finished: threading.Event) -> Iterator[Counter[str]]:
    """Yield counts until finished, or the folder is gone."""
    yield Counter()
    is_last = False
    while not is_last:
        is_last = finished.wait(_POLL_SECONDS)
        try:
            counts = total_counts(folder)
        except FileNotFoundError:
            return
        yield counts


def _draw(stages: Iterator[JobStage]) -> None:
    is_terminal = sys.stderr.isatty()
    screen = sys.stderr if is_terminal else io.StringIO()
    next_line = time.monotonic() + HEARTBEAT_SECONDS
    verb, bar = "", tqdm(disable=True)
    for stage in stages:
        if verb != stage.verb:
            bar.close()
            verb = stage.verb
            bar = tqdm(desc=verb, unit=stage.unit, unit_scale=True, dynamic_ncols=True, file=screen)
        bar.total, bar.n = stage.total, stage.done
        if stage.num_tokens:
            speed = stage.num_tokens / max(bar.format_dict["elapsed"], _POLL_SECONDS)
            bar.set_postfix_str(f"{format_short(speed)} student tokens/s", refresh=False)
        if is_terminal:
            bar.refresh()
        elif stage.done and time.monotonic() >= next_line:
            print(bar, file=sys.stderr, flush=True)
            next_line = time.monotonic() + HEARTBEAT_SECONDS
    bar.close()
