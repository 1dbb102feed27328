"""What is counted, said, and written: each failure as a file of documents and one command."""

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.oracle import Fault
    from tests.fuzz.rounds import Target

FILES_OF_A_KIND = 5
"""Failures of one kind on one tokenizer that get a file; more are counted."""

_PROGRESS_SECONDS = 10.0


@dataclass
class Report:
    """What a run has found so far.

    Attributes:
        folder: failures are written below it.
        counts: of everything that was tried.
        failures: by kind and what they were found on.
    """

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    shown: float = 0.0

    def add_texts(self, target: "Target", fault: "Fault", texts: Sequence[str]) -> None:
        """Write texts that a tokenizer fails on, and say how to try them again."""
        path = self._next_file(fault, target.name, ".jsonl")
        around = vars(target) | {"path": str(path.with_suffix(".tokenizer.json"))}
        if target.name.startswith("fresh-"):
            shutil.copy(target.path, around["path"])
        else:
            around["path"] = target.path
        lines = [{"id": str(n), "text": text, **around} for n, text in enumerate(texts)]
        what = f"{fault.kind} on {target.name}: {', '.join(map(ascii, texts))[:300]}"
        self._write(path, "".join(json.dumps(line) + "\n" for line in lines), what, fault)

    def add_steps(self, fault: "Fault", steps: Sequence[dict[str, Any]]) -> None:
        """Write the commands, with their documents, after which a dataset is not as it must be."""
        names = ", ".join(f"{step['command']} ({step['fault']['kind']})" for step in steps)
        path = self._next_file(fault, "commands", ".json")
        self._write(path, json.dumps(steps, indent=1), f"{fault.kind} after {names}", fault)

    def show_progress(self) -> None:
        """Print a line every few seconds."""
        now = time.monotonic()
        if now - self.shown >= _PROGRESS_SECONDS:
            self.shown = now
            names = ("tokenizers", "texts", "commands")
            tried = ", ".join(f"{self.counts[name]:,} {name}" for name in names)
            found = f"{len(self.failures)} kinds of failures"
            print(f"[{now - self.started:5.0f} s] {tried}: {found}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Return everything that was counted, and the failures."""
        lines = [f"{count:>10,} {name}" for name, count in sorted(self.counts.items())]
        lines += [f"FAILED {n:>4} x {kind} on {name}" for (kind, name), n in self.failures.items()]
        return "\n".join([*lines, "" if self.failures else "no failure"])

    def _next_file(self, fault: "Fault", name: str, suffix: str) -> Path:
        self.failures[fault.kind, name] += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{fault.kind}-{name}-{self.failures[fault.kind, name]}{suffix}"

    def _write(self, path: Path, text: str, what: str, fault: "Fault") -> None:
        path.write_text(text, "utf-8")
        seconds = time.monotonic() - self.started
        print(f"\nFAILED after {seconds:.0f} s: {what}\n  {fault.detail[:400]}", flush=True)
        print(f"  python -m tests.fuzz --replay {path}\n", flush=True)
