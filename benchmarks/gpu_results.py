"""What the parts of benchmarks/gpu.py find: a file of results, and what commands print."""

import json
import subprocess
from pathlib import Path
from typing import Any


def note(work: Path, part: str, **values: Any) -> None:
    """Append a result, as JSON lines."""
    with (work / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"part": part, **values}) + "\n")


def read_results(work: Path) -> dict[str, dict[str, Any]]:
    """Return what each part has noted, the newest of each value."""
    found: dict[str, dict[str, Any]] = {}
    for line in (work / "results.jsonl").read_text("utf-8").splitlines():
        values = json.loads(line)
        found.setdefault(values.pop("part"), {}).update(values)
    return found


def run_and_print(command: list[str], cwd: Path | None = None) -> tuple[int, str]:
    """Run a command; print its output as it comes, and return its status and the output."""
    lines = []
    with subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)
