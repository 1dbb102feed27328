"""The second half: commands on a dataset that grows, faults in the middle, and what is left."""

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.command_line.commands import COMMANDS, main
from tests.fuzz.reader import DamageError, Seen, read_dataset
from tests.fuzz.report import Fault, Report
from tests.fuzz.texts import make_text
from tests.support.datasets import byte_level

Step = dict[str, Any]  # a command with its documents and its fault
STEPS_OF_A_DATASET = 8
LONGEST_SECONDS = 180.0
FAULTS = ("none", "kill", "kill", "kill", "kill", "limit", "cut", "cut", "twin", "twin")
NOTHING = Seen(-1, {}, frozenset(), {})
SIZES = {"student": 300, "teacher": 340}


class StepFailedError(Exception):
    """After a step, something is not as it must be: `args[0]` is the fault."""


def fuzz_commands(seed: str, until: float, report: Report) -> None:
    """Grow one dataset after another until `time.monotonic` says that it is enough."""
    while time.monotonic() < until:
        choose = random.Random(f"{seed} dataset {report.counts['datasets']}")
        steps = [draw_step(choose, place) for place in range(STEPS_OF_A_DATASET)]
        fault, taken = _take_all(steps, report.counts, until)
        if fault is not None:
            report.add(fault, "commands", {"steps": steps[:taken]})
        report.counts["datasets"] += 1


def draw_step(choose: random.Random, number: int) -> Step:
    """Return a command with documents or ids, and the fault that meets it."""
    command = choose.choice(["align", "align", "remove"]) if number else "align"
    fault = {
        "kind": choose.choice(FAULTS),
        "event": int(2 ** choose.uniform(0, 7.5)),  # the n-th use of a file kills
        "bytes": int(2 ** choose.uniform(0, 16)),
        "share": choose.random(),  # of the dataset's files
        "kept": choose.random(),  # of the file that is cut
    }
    documents, twin = (draw_documents(choose, start) for start in (number, number + 100))
    ids = [f"d{choose.randrange(number + 1)}-{choose.randrange(30)}" for _ in range(4)]
    return {"command": command, "fault": fault, "documents": documents, "ids": ids, "twin": twin}


def draw_documents(choose: random.Random, number: int) -> list[list[Any]]:
    """Return [id, text, source] of new documents, some unusable, some with ids that are taken."""
    documents: list[list[Any]] = []
    for place in range(choose.choice((1, 5, 30))):
        text = make_text(choose)[:200] or "x"
        documents.append([f"d{number}-{place}", text, choose.choice(["web", "book", None])])
        if choose.random() < 0.1:
            documents.append([f"empty{number}-{place}", "", None])
        if choose.random() < 0.1:
            documents.append([f"d{choose.randrange(number + 1)}-{place}", "taken", "web"])
    return documents


class Command:
    """A command in a process forked from this one, which has imported everything."""

    def __init__(self, arguments: list[str], folder: Path, fault: Step | None = None) -> None:
        """Start it; a fault kills it at the n-th use of a file below a folder, or limits files."""
        self.hangs = False  # or it was killed because it took too long
        self._until = time.monotonic() + LONGEST_SECONDS
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._run, args=(arguments, folder, fault or {}))
        self.process.start()

    def ended(self, seconds: float = 0) -> bool:
        """Wait for its end; return whether it has come."""
        if time.monotonic() > self._until and self.process.is_alive():
            self.hangs = True
            self.process.kill()
        self.process.join(seconds)
        return not self.process.is_alive()

    def status(self, kind: str) -> int:
        """Return the status with which it ended, which must have been in words."""
        status, said = self.process.exitcode or 0, self.said()
        if self.hangs:
            _fail("hangs", f"{kind}: {said[-300:]}")
        if status not in (0, 1, 2, -signal.SIGKILL) or "Traceback" in said:
            _fail("traceback", f"{kind}: status {status}: {said[-900:]}")
        return status

    def said(self) -> str:
        """Return its output."""
        self._output.seek(0)
        return self._output.read().decode("utf-8", "replace")

    def _run(self, arguments: list[str], folder: Path, fault: Step) -> None:
        for stream in (1, 2):
            os.dup2(self._output.fileno(), stream)
        if fault.get("kind") == "limit":  # its own output is such a file, too
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + fault["bytes"],) * 2)
        if fault.get("kind") == "kill":
            _die_at(fault["event"], folder)
        main(arguments)


def _die_at(event: int, folder: Path) -> None:
    left = [event]

    def count_uses(name: str, arguments: tuple[Any, ...]) -> None:
        named = name.startswith(("open", "os.", "shutil.")) and arguments
        if named and str(arguments[0]).startswith(str(folder)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_uses)


class GrowingDataset:
    """A dataset with its inputs and tokenizers below a root, and what must be in it."""

    def __init__(self, root: Path, counts: Counter[str]) -> None:
        """Begin with none."""
        self.root, self.counts = root, counts
        self.now: Seen | None = None  # what a reader must see
        self.kept: list[Seen] = []  # what readers of earlier generations must see
        for side, size in SIZES.items():
            (root / f"{side}.json").write_bytes(byte_level(size).file_bytes)

    def take(self, step: Step) -> None:
        """Run a command into its fault, then run it again, and read what is there all the while.

        Raises:
            StepFailedError: a reader sees what must not be, or a command says what it must not.
        """
        fault, kind = step["fault"], step["fault"]["kind"]
        if step["command"] != "align" and self.now is None:
            return
        runs, after = [self._arguments(step)], predict(step, self.now)
        states, ends = [self.now, after], [after]
        if kind == "twin" and self.now is not None:
            other = {"command": "align", "documents": step["twin"]}
            runs.append(self._arguments(other))
            ends = [predict(other, after), predict(step, predict(other, self.now))]
            states += [predict(other, self.now), *ends]
        with self._cut_file(fault):
            commands = [Command(arguments, self.root, fault) for arguments in runs]
            while not all(command.ended(0.05) for command in commands):
                if kind != "cut" and self._see(states) is not None:
                    self.counts["reads during a command"] += 1
        self.counts.update(["commands", f"faults: {kind}"])
        self.counts["kills"] += commands[0].process.exitcode == -signal.SIGKILL
        self._see(states)
        for command, arguments in zip(commands, runs, strict=True):
            if command.status(kind):
                again = Command(arguments, self.root)
                again.ended(LONGEST_SECONDS)
                if status := again.status("again"):
                    _fail("again", f"status {status}: {again.said()[-300:]}")
        self._settle(step["command"], ends)

    def _settle(self, command: str, ends: Sequence[Seen]) -> None:
        """Check that a step is done, and that nothing is left lying about."""
        seen = self._see(ends)
        if self.now is not None and seen.generation > self.now.generation:
            self.kept.append(self.now)
        self.now, folder = seen, self.root / "aligned"
        if left := [path.name for path in folder.glob(".*")]:
            _fail("left", f"{left} after {command}")
        for state in self.kept[-2:]:
            old = read_dataset(folder, f"manifests/{state.generation:03d}.json")
            if old != state:
                _fail("kept", _difference(old, state))

    def _see(self, states: Sequence[Seen | None]) -> Any:
        """Return what a reader sees, which must be one of some states."""
        folder = self.root / "aligned"
        try:
            seen = read_dataset(folder) if (folder / "manifest.json").exists() else None
        except (DamageError, OSError, ValueError) as error:
            _fail("damage", f"{type(error).__name__}: {error}")
        if seen not in states:
            _fail("state", "; ".join(_difference(seen, state) for state in states))
        return seen

    def _arguments(self, step: Step) -> list[str]:
        """Write a command's documents or ids, and return its arguments."""
        path, output = self.root / f"{time.monotonic_ns()}.jsonl", str(self.root / "aligned")
        if step["command"] == "remove":
            path.write_text("".join(json.dumps(name) + "\n" for name in step["ids"]))
            return ["remove", output, f"--ids={path}", "--ignore-unknown", "--quiet"]
        lines = [dict(zip(("id", "text", "source"), d, strict=True)) for d in step["documents"]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sides = [f"--{side}={self.root / side}.json" for side in SIZES]
        fixed = ["--metadata=source:string", "--keep-text", "--shard-bytes=16KiB", "--quiet"]
        places = [f"--input={path}", f"--output={output}", *(["--append"] if self.now else [])]
        return ["align", *places, *sides, *fixed, "--max-dead-letters=1"]

    @contextmanager
    def _cut_file(self, fault: Step) -> Iterator[None]:
        """Cut one of the dataset's files while a command runs, then put it back."""
        files = sorted(p for p in (self.root / "aligned").glob("**/*") if p.is_file())
        if fault["kind"] != "cut" or not files:
            yield
            return
        path = files[int(fault["share"] * len(files))]
        whole = path.read_bytes()
        cut = whole[: int(fault["kept"] * len(whole))]
        path.write_bytes(cut)
        yield
        if path.exists() and path.read_bytes() == cut:
            path.write_bytes(whole)


def predict(step: Step, before: Seen | None) -> Seen:
    """Return what a reader must see after a command that nothing has disturbed."""
    before = before or NOTHING
    documents, letters, removed = dict(before.documents), Counter[str](), set(before.removed)
    if step["command"] == "remove":
        removed |= set(step["ids"]) & documents.keys()
        documents = {name: documents[name] for name in documents.keys() - removed}
        letters.update(before.letters)
    taken = before.documents.keys() | removed
    for name, text, source in step["documents"] if step["command"] == "align" else ():
        if not text or name in taken:
            letters["known_id" if text else "empty_text"] += 1
        elif name in documents:
            letters["duplicate_id"] += 1
        else:
            documents[name] = (text, source)
    if len(documents) == len(before.documents):
        return before
    return Seen(before.generation + 1, documents, frozenset(removed), dict(letters))


def replay(body: dict[str, Any]) -> int:
    """Take the steps of a failure again; return the exit status."""
    fault, _ = _take_all(body["steps"], Counter())
    print(f"{fault.kind}: {fault.detail}" if fault else "no failure")
    return int(fault is not None)


def _take_all(
    steps: Sequence[Step], counts: Counter[str], until: float = float("inf")
) -> tuple[Fault | None, int]:
    """Take steps; return what fails, and how many were taken."""
    _import_commands()
    with tempfile.TemporaryDirectory(prefix="vocag-fuzz-") as folder:
        dataset = GrowingDataset(Path(folder), counts)
        for number, step in enumerate(steps):
            if time.monotonic() >= until:
                break
            try:
                dataset.take(step)
            except StepFailedError as failed:
                return failed.args[0], number + 1
    return None, len(steps)


@cache
def _import_commands() -> None:
    """Import once what every command would import, and compile kernels."""
    for name in ("align", "remove"):
        import_module(COMMANDS[name][0])
    align_batch([SourceDocument("d", "é".encode())], byte_level(300), byte_level(340))


def _difference(seen: Seen | None, state: Seen | None) -> str:
    seen, state = seen or NOTHING, state or NOTHING
    names = seen.documents.keys() ^ state.documents.keys()
    other = [n for n, c in seen.documents.items() if state.documents.get(n, c) != c]
    numbers = (seen.generation, state.generation, seen.letters, state.letters)
    return f"generations, letters {numbers}, ids {sorted(names)[:5]}, contents {other[:5]}"


def _fail(kind: str, detail: str) -> NoReturn:
    raise StepFailedError(Fault(kind, detail))
