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
    seen: set[tuple[str, ...]] = field(default_factory=set)
    shown: float = 0.0

    def add_texts(self, target: "Target", fault: "Fault", texts: Sequence[str]) -> None:
        """Write texts that a tokenizer fails on, and say how to try them again."""
        known = (fault.kind, target.name, *texts) in self.seen
        self.seen.add((fault.kind, target.name, *texts))
        path = None if known else self._next_file(fault.kind, target.name, ".jsonl")
        if path is None:
            self.counts["repeated"] += 1
            return
        tokenizer = target.path
        if target.name.startswith("fresh-"):
            tokenizer = str(path.with_suffix(".tokenizer.json"))
            shutil.copy(target.path, tokenizer)
        around = {"tokenizer": tokenizer, "special_strings": target.special_strings}
        around["fast"] = target.fast
        lines = [{"id": str(n), "text": text, **around} for n, text in enumerate(texts)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        shown = ", ".join(map(ascii, texts))[:300]
        self._say(path, f"{fault.kind} on {target.name} ({target.special_strings}): {shown}", fault)

    def add_steps(self, fault: "Fault", steps: Sequence[dict[str, Any]]) -> None:
        """Write the commands, with their documents, after which a dataset is not as it must be."""
        path = self._next_file(fault.kind, "commands", ".json")
        if path is not None:
            path.write_text(json.dumps(list(steps), indent=1), "utf-8")
            names = ", ".join(f"{step['command']} ({step['fault']['kind']})" for step in steps)
            self._say(path, f"{fault.kind} after {names}", fault)

    def show_progress(self) -> None:
        """Print a line every few seconds."""
        now = time.monotonic()
        if now - self.shown >= _PROGRESS_SECONDS:
            self.shown = now
            tried = ", ".join(
                f"{self.counts[n]:,} {n}" for n in ("tokenizers", "texts", "commands")
            )
            found = f"{len(self.failures)} kinds of failures"
            print(f"[{now - self.started:5.0f} s] {tried}: {found}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Return everything that was counted, and the failures."""
        lines = [f"{count:>10,} {name}" for name, count in sorted(self.counts.items())]
        lines += [f"FAILED {n:>4} x {kind} on {name}" for (kind, name), n in self.failures.items()]
        return "\n".join([*lines, "" if self.failures else "no failure"])

    def _next_file(self, kind: str, name: str, suffix: str) -> Path | None:
        self.failures[kind, name] += 1
        number = self.failures[kind, name]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{kind}-{name}-{number}{suffix}"
        return path if number <= FILES_OF_A_KIND else None

    def _say(self, path: Path, what: str, fault: "Fault") -> None:
        seconds = time.monotonic() - self.started
        print(f"\nFAILED after {seconds:.0f} s: {what}\n  {fault.detail[:400]}", flush=True)
        print(f"  python -m tests.fuzz --replay {path}\n", flush=True)
