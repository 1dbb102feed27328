"""The second half: commands on a dataset that grows, faults in the middle, and what is left."""

import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from subprocess import DEVNULL, run
from typing import Any, NoReturn

import tokenizers

from tests.fuzz.oracle import Fault
from tests.fuzz.processes import LONGEST_SECONDS, Process, import_commands
from tests.fuzz.reader import Content, DamageError, Seen, read_dataset
from tests.fuzz.report import Report
from tests.fuzz.shrinking import shrink_list
from tests.fuzz.texts import make_text
from tests.support.datasets import byte_level
from tests.support.reference import reference_spans, spelled_offsets, vocabulary_bytes

Step = dict[str, Any]
"""A command with its documents and its fault; a list of them is a file that can be tried again."""

STEPS_OF_A_DATASET = 8
SHRINK_SECONDS = 60.0
DISK_BYTES = 24 << 20
FAULTS = ("none", "kill", "kill", "kill", "later", "limit", "full", "cut", "cut", "twin", "twin")
NOTHING = Seen(-1, {}, frozenset(), {})
SIZES = {"student": 300, "teacher": 340}


class StepFailedError(Exception):
    """After a step, something is not as it must be: `args[0]` is the fault."""


def fuzz_commands(seed: str, until: float, report: Report) -> None:
    """Grow one dataset after another until `time.monotonic` says that it is enough."""
    import_commands()
    for number in count():
        choose = random.Random(f"{seed} dataset {number}")
        steps = [draw_step(choose, place) for place in range(STEPS_OF_A_DATASET)]
        failed = _take_all(steps, report, until)
        if time.monotonic() >= until and failed is None:
            return
        if failed is not None:
            report.add_steps(failed, _shrink(steps, failed))
        report.counts["datasets"] += 1


def draw_step(choose: random.Random, number: int) -> Step:
    """Return a command with documents or ids, and the fault that meets it."""
    command = choose.choice(["align", "align", "remove"]) if number else "align"
    fault = {
        "kind": choose.choice(FAULTS),
        "event": int(2 ** choose.uniform(0, 7.5)),  # the n-th use of a file kills
        "seconds": choose.uniform(0, 2),
        "bytes": int(2 ** choose.uniform(0, 16)),
        "share": choose.random(),  # of the dataset's files
        "kept": choose.random(),  # of the file that is cut
        "tears": choose.random() < 0.3,
    }
    return {
        "command": command,
        "fault": fault,
        "documents": draw_documents(choose, number),
        "ids": [f"d{choose.randrange(number + 1)}-{choose.randrange(30)}" for _ in range(4)],
        "twin": draw_documents(choose, number + 100),
    }


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


@dataclass
class GrowingDataset:
    """A dataset on a small disk, and what must be in it.

    Attributes:
        root: holds it, its inputs and its tokenizers.
        counts: of what was tried.
        now: what a reader must see; None before there is a dataset.
        kept: what readers of earlier generations must see.
    """

    root: Path
    counts: Counter[str]
    now: Seen | None = None
    kept: list[Seen] = field(default_factory=list)

    def take(self, step: Step) -> None:
        """Run a command into its fault, then run it again, and read what is there all the while.

        Raises:
            StepFailedError: a reader sees what must not be, or a command says what it must not.
        """
        fault, command = step["fault"], step["command"]
        if command != "align" and self.now is None:
            return
        first, twin = self._arguments(step), None
        after = predict(step, self.now)
        states, ends = [self.now, after], [after]
        if fault["kind"] == "twin" and self.now is not None:
            other = {"command": "align", "documents": step["twin"]}
            twin = self._arguments(other)
            ends = [predict(other, after), predict(step, predict(other, self.now))]
            states += [predict(other, self.now), *ends]
        self.counts["commands"] += 1
        with self._cut_file(fault), _ballast(self.root, fault):
            started = [Process(each, self.root, fault) for each in (first, twin) if each]
            while running := [process for process in started if not process.ended()]:
                if fault["kind"] == "later" and started[0].seconds() > fault["seconds"]:
                    running[0].kill()
                if fault["kind"] != "cut" and self._see(states) is not None:
                    self.counts["reads beside a command"] += 1
                time.sleep(0.05)  # reading takes the time of what is read
        self.counts[f"faults: {fault['kind']}"] += 1
        self.counts["kills"] += started[0].status == -9
        self._see(states)
        torn = started[0].status == -9 and fault["tears"] and self._tear(fault)
        for process, arguments in zip(started, (first, twin), strict=False):
            _require_calm(process, fault["kind"])
            if process.status:
                again = _require_calm(Process(arguments or [], self.root).end(), "again")
                if again.status:
                    _fail(
                        "torn" if torn else "again", f"status {again.status}: {again.said[-300:]}"
                    )
        self._settle(command, ends)

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
        seen = None
        try:
            if (self.root / "aligned" / "manifest.json").exists():
                seen = read_dataset(self.root / "aligned")
        except (DamageError, OSError, ValueError) as error:
            _fail("damage", f"{type(error).__name__}: {error}")
        if seen not in states:
            _fail("state", "; ".join(_difference(seen, state) for state in states))
        return seen

    def _arguments(self, step: Step) -> list[str]:
        """Write a command's documents or ids, and return its arguments."""
        path, output = self.root / f"{time.monotonic_ns()}.jsonl", str(self.root / "aligned")
        for side, size in SIZES.items():
            (self.root / f"{side}.json").write_bytes(byte_level(size).file_bytes)
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
        path = self._choose_file("**/*", fault) if fault["kind"] == "cut" else None
        if path is None:
            yield
            return
        whole = path.read_bytes()
        cut = whole[: int(fault["kept"] * len(whole))]
        path.write_bytes(cut)
        yield
        if path.exists() and path.read_bytes() == cut:
            path.write_bytes(whole)

    def _tear(self, fault: Step) -> bool:
        """Cut a file that a killed command has written, as a machine that loses power does."""
        if path := self._choose_file(".vocag*/**/*", fault):
            data = path.read_bytes()
            path.write_bytes(data[: int(fault["kept"] * len(data))])
            self.counts["files of killed commands that were cut"] += 1
        return path is not None

    def _choose_file(self, pattern: str, fault: Step) -> Path | None:
        files = sorted(p for p in (self.root / "aligned").glob(pattern) if p.is_file())
        return files[int(fault["share"] * len(files))] if files else None


def predict(step: Step, before: Seen | None) -> Seen:
    """Return what a reader must see after a command that nothing has disturbed."""
    before = before or NOTHING
    documents, letters, removed = dict(before.documents), Counter[str](), set(before.removed)
    if step["command"] == "remove":
        removed |= set(step["ids"]) & documents.keys()
        documents = {name: documents[name] for name in documents.keys() - removed}
        letters.update(before.letters)
    for name, text, source in step["documents"] if step["command"] == "align" else ():
        if not text or name in documents or name in removed:
            letters["duplicate_id" if text else "empty_text"] += 1
        else:
            documents[name] = (text, source, *_align(text))
    if len(documents) == len(before.documents):
        return before
    return Seen(before.generation + 1, documents, frozenset(removed), dict(letters))


def replay(path: Path) -> int:
    """Take the steps of a file again; return the exit status."""
    import_commands()
    fault = _take_all(json.loads(path.read_text("utf-8")))
    print(f"{fault.kind}: {fault.detail}" if fault else "no failure")
    return int(fault is not None)


def _take_all(
    steps: Sequence[Step], report: Report | None = None, until: float = float("inf")
) -> Fault | None:
    with _disk() as folder:
        dataset = GrowingDataset(folder, report.counts if report else Counter())
        try:
            for step in steps:
                if time.monotonic() < until:
                    dataset.take(step)
                    _ = report and report.show_progress()
        except StepFailedError as failed:
            return failed.args[0]
    return None


def _shrink(steps: list[Step], fault: Fault) -> list[Step]:
    """Return fewer steps, with fewer documents, that fail in the same way."""
    until = time.monotonic() + SHRINK_SECONDS

    def fails(tried: list[Step]) -> bool:
        found = _take_all(tried)
        return found is not None and found.kind == fault.kind

    if not fails(steps):
        return steps  # it depends on the moment
    small = shrink_list(steps, fails, until=until)
    for n, step in enumerate(small):
        plain = {**step, "documents": step["documents"][:1], "twin": step["twin"][:1]}
        if time.monotonic() < until and fails(tried := [*small[:n], plain, *small[n + 1 :]]):
            small = tried
    return small


@contextmanager
def _disk() -> Iterator[Path]:
    """Make a folder on a disk of its own where root may mount one, so that it can be filled."""
    folder = Path(tempfile.mkdtemp(prefix="vocag-fuzz-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = run(mount, stderr=DEVNULL, check=False).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ballast(folder: Path, fault: Step) -> Iterator[None]:
    """Fill a small disk but for some bytes; one that isn't ours stays as it is."""
    path, free = folder / "ballast", shutil.disk_usage(folder).free
    if fault["kind"] == "full" and free <= DISK_BYTES:
        path.write_bytes(bytes(max(0, free - 4 * fault["bytes"])))
    yield
    path.unlink(missing_ok=True)


@cache
def _library(side: str) -> tuple[Any, dict[int, bytes]]:
    """Return a tokenizer without control tokens, and what its tokens stand for."""
    body = json.loads(byte_level(SIZES[side]).file_bytes)
    bare = tokenizers.Tokenizer.from_str(json.dumps(body | {"added_tokens": []}))
    return bare, vocabulary_bytes(body)


def _align(text: str) -> Content:
    """Return both sides' ids and ranges of a text, and its spans, by the libraries and oracles."""
    content: list[Any] = []
    for side in SIZES:
        library, table = _library(side)
        ids = library.encode(text).ids
        content += [ids, spelled_offsets([table[i] for i in ids], text.encode())]
    return (*content, reference_spans(content[1], content[3]))


def _require_calm(process: Process, kind: str) -> Process:
    """Check that a command ended in words."""
    if process.status == -9 and process.seconds() > LONGEST_SECONDS:
        _fail("hangs", f"{kind}: {process.said[-300:]}")
    if process.status not in (0, 1, 2, -9) or "Traceback" in process.said:
        _fail("traceback", f"{kind}: status {process.status}: {process.said[-900:]}")
    return process


def _difference(seen: Seen | None, state: Seen | None) -> str:
    seen, state = seen or NOTHING, state or NOTHING
    names = seen.documents.keys() ^ state.documents.keys()
    other = [n for n, c in seen.documents.items() if state.documents.get(n, c) != c]
    numbers = (seen.generation, state.generation, seen.letters, state.letters)
    return f"generations, letters {numbers}, ids {sorted(names)[:5]}, contents {other[:5]}"


def _fail(kind: str, detail: str) -> NoReturn:
    raise StepFailedError(Fault(kind, detail))
