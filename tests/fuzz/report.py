"""What is counted, said, and written: each failure as a file and one command."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.oracle import Fault

FILES_OF_A_KIND = 5
"""Failures of one kind on one tokenizer that get a file; more are counted."""


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

    def add(self, fault: "Fault", name: str, body: Any) -> None:
        """Write what fails as JSON, and say how to try it again."""
        self.failures[fault.kind, name] += 1
        number = self.failures[fault.kind, name]
        if number > FILES_OF_A_KIND:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{fault.kind}-{name}-{number}.json"
        path.write_text(json.dumps(body, indent=1), "utf-8")
        print(f"\nFAILED: {fault.kind} on {name}\n  {fault.detail[:400]}", flush=True)
        print(f"  python -m tests.fuzz --replay {path}\n", flush=True)

    def summary(self) -> str:
        """Return everything that was counted, and the failures."""
        lines = [f"{count:>10,} {name}" for name, count in sorted(self.counts.items())]
        lines += [f"FAILED {n:>4} x {kind} on {name}" for (kind, name), n in self.failures.items()]
        return "\n".join([*lines, "" if self.failures else "no failure"])
