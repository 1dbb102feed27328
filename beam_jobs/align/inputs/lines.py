"""Line numbers for dead letters, though a large file is read in parts that don't know each other.

A reader counts lines from the start of its part. Of a file that is cut it leaves the number of
lines of each part in the run's folder, and the last step adds up those before a letter's part:
exact, and nothing is read twice.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable
from hashlib import sha256
from itertools import accumulate
from typing import Any

from beam_jobs import storage
from beam_jobs.align.inputs.parts import InputPart
from beam_jobs.left_out import DUPLICATE_OF

_PREFIX = "lines-"


def keep_line_count(run_folder: str, part: InputPart, num_lines: int) -> None:
    """Leave a part's number of lines in the run's folder; a whole file needs none."""
    if not part.is_whole:
        path = storage.join(run_folder, f"{_stem(part.file.source)}{part.start:015d}.json")
        storage.write_atomically(path, json.dumps(num_lines).encode(), scratch=run_folder)


def name_lines(letters: Iterable[dict[str, Any]], run_folder: str) -> list[dict[str, Any]]:
    """Return dead letters as the dataset lists them: lines counted from the start of files."""
    counts = _Counts(run_folder)
    return [_name_line(letter, counts) for letter in letters]


def _name_line(letter: dict[str, Any], counts: "_Counts") -> dict[str, Any]:
    source, position, detail = letter["source"], letter["position"], letter["detail"]
    line = counts.resolve(source, position, letter.get("line"))
    if letter.get("first_line") is not None:
        first, _, first_position = detail.removeprefix(DUPLICATE_OF).rpartition("#")
        first_line = counts.resolve(first, int(first_position), letter["first_line"])
        detail = f"{DUPLICATE_OF}{first} line {first_line}"
    rest = {name: letter[name] for name in ("document_id", "reason")}
    return {"source": source, "position": position, "line": line, **rest, "detail": detail}


class _Counts:
    """Where the parts of cut files start, and how many lines are before each."""

    def __init__(self, run_folder: str) -> None:
        self._folder = run_folder
        names = sorted(name for name in storage.list_folder(run_folder) if name.startswith(_PREFIX))
        self._names: dict[str, list[str]] = {}
        for name in names:
            self._names.setdefault(name.rpartition("-")[0] + "-", []).append(name)
        self._parts: dict[str, tuple[list[int], list[int]]] = {}

    def resolve(self, source: str, position: int, line: int | None) -> int | None:
        if line is None or _stem(source) not in self._names:
            return line
        if source not in self._parts:
            self._parts[source] = self._read(self._names[_stem(source)])
        starts, before = self._parts[source]
        return line + before[bisect_right(starts, position) - 1]

    def _read(self, names: list[str]) -> tuple[list[int], list[int]]:
        starts = [int(name.rpartition("-")[2].removesuffix(".json")) for name in names]
        paths = [storage.join(self._folder, name) for name in names]
        return starts, [0, *accumulate(json.loads(storage.read_bytes(path)) for path in paths)]


def _stem(source: str) -> str:
    """A source may hold anything, a file's name in the run's folder may not."""
    return f"{_PREFIX}{sha256(source.encode(errors='surrogateescape')).hexdigest()[:32]}-"
