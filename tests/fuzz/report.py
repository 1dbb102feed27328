"""What is counted, said, and written: each failure as a file and one command."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What is wrong: one word for what was expected, and the values."""

    kind: str
    detail: str


@dataclass
class Report:
    """What a run has found so far: what was tried, and failures by kind and what they are of."""

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, fault: Fault, name: str, body: Any) -> None:
        """Write what fails as JSON, and say how to try it again."""
        self.failures[fault.kind, name] += 1
        if (number := self.failures[fault.kind, name]) > 5:
            return  # more of a kind are counted
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
