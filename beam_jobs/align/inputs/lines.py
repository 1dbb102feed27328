"""Line numbers for dead letters of files read in parts.

Parts leave their numbers of lines in the run's folder; the last step adds up those before a letter.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from itertools import accumulate
from typing import Any

from beam_jobs import storage
from beam_jobs.align.inputs.parts import InputPart
from beam_jobs.left_out import DUPLICATE_OF
from beam_jobs.resuming import LINES_PREFIX


def keep_line_count(run_folder: str, part: InputPart, num_lines: int) -> None:
    """Leave a part's number of lines."""
    if part.start or part.end is not None:
        path = storage.join(run_folder, f"{_stem(part.file.source)}{part.start:015d}.json")
        storage.write_atomically(path, json.dumps(num_lines).encode(), scratch=run_folder)


def name_lines(letters: Iterable[dict[str, Any]], run_folder: str) -> list[dict[str, Any]]:
    """Count dead letters' lines from the start of files."""
    stems: dict[str, list[str]] = {}
    for name in sorted(storage.list_folder(run_folder)):
        stems.setdefault(name.rpartition("-")[0] + "-", []).append(name)

    @cache
    def parts(source: str) -> tuple[list[int], list[int]]:
        """Starts of a file's parts, and lines before each."""
        names = stems.get(_stem(source), [])
        starts = [int(name.rpartition("-")[2].removesuffix(".json")) for name in names]
        counts = (storage.read_bytes(storage.join(run_folder, name)) for name in names)
        return starts, [0, *accumulate(map(json.loads, counts))]

    def in_file(source: str, position: int, line: int | None) -> int | None:
        if line is None:
            return None
        starts, before = parts(source)
        return line + before[max(0, bisect_right(starts, position) - 1)]

    def name_line(letter: dict[str, Any]) -> dict[str, Any]:
        source, position, detail = letter["source"], letter["position"], letter["detail"]
        line = in_file(source, position, letter.get("line"))
        if letter.get("first_line") is not None:
            first, _, first_position = detail.removeprefix(DUPLICATE_OF).rpartition("#")
            first_line = in_file(first, int(first_position), letter["first_line"])
            detail = f"{DUPLICATE_OF}{first} line {first_line}"
        rest = {name: letter[name] for name in ("document_id", "reason")}
        return {"source": source, "position": position, "line": line, **rest, "detail": detail}

    return list(map(name_line, letters))


def hash_source(source: str) -> str:
    """Hash a source, which may hold any character, for file names."""
    return sha256(source.encode(errors="surrogateescape")).hexdigest()[:32]


def _stem(source: str) -> str:
    return f"{LINES_PREFIX}{hash_source(source)}-"
