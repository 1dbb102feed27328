"""Find files without a usable document, although they are read in parts.

Such a file may be an error page, or hold all documents in one object, so shares don't count. Parts
leave notes in the run's folder; if these cover a file, the last step adds a dead letter.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from beam_jobs import storage
from beam_jobs.align.inputs.documents import Outcome, PlacedDocument, Reason
from beam_jobs.align.inputs.lines import hash_source
from beam_jobs.align.inputs.parts import DATASET, InputFile, InputPart
from beam_jobs.left_out import UNREAD
from beam_jobs.resuming import UNUSABLE_PREFIX
from pipeline.drawing.formatting import format_count


def may_be_unusable(file: InputFile) -> bool:
    """Whether a file holds several documents, and isn't a dataset's."""
    return file.format not in (DATASET, "text")


def note_unusable(
    outcomes: Iterable[Outcome], part: InputPart, run_folder: str
) -> Iterator[Outcome]:
    """Pass outcomes on; leave a note if none is a document."""
    is_usable = not may_be_unusable(part.file)
    for outcome in outcomes:
        is_usable |= isinstance(outcome, PlacedDocument)
        yield outcome
    if not is_usable:
        name = f"{UNUSABLE_PREFIX}{hash_source(part.file.source)}-{part.start:015d}.json"
        note = json.dumps([part.file.source, part.start, part.end]).encode()
        storage.write_atomically(storage.join(run_folder, name), note, scratch=run_folder)


def letters_of_files(letters: Sequence[dict[str, Any]], run_folder: str) -> list[dict[str, Any]]:
    """A dead letter for each file that notes cover.

    Unreadable files, which have letters already, and empty files get none.
    """
    unusable = _read_notes(run_folder)
    found = []
    for source, own in groupby(letters, key=itemgetter("source")):
        of_file = list(own)
        if source in unusable and not any(each["reason"] == UNREAD for each in of_file):
            place = {"source": source, "position": 0, "line": None, "document_id": None}
            detail = describe_unusable(of_file)
            found.append({**place, "reason": Reason.NOTHING_USABLE.value, "detail": detail})
    return found


def describe_unusable(letters: Sequence[Mapping[str, Any]], *, of: str = "") -> str:
    """Explain why a file's documents are unusable."""
    first: dict[str, str] = {}
    for letter in letters:
        place = f"line {letter['line']}" if letter["line"] else f"#{letter['position']}"
        first.setdefault(letter["reason"], f"{place}: {letter['detail']}")
    counts = Counter(letter["reason"] for letter in letters)
    told = ", ".join(
        f"{name} {format_count(n)} ({first[name]})" for name, n in counts.most_common()
    )
    return f"not one document{of} can be used: {told}"


def _read_notes(run_folder: str) -> set[str]:
    """Sources of files that notes cover."""
    notes: dict[str, list[tuple[int, int | None]]] = {}
    for name in sorted(storage.list_folder(run_folder)):
        if name.startswith(UNUSABLE_PREFIX):
            source, start, end = json.loads(storage.read_bytes(storage.join(run_folder, name)))
            notes.setdefault(source, []).append((start, end))
    return {source for source, parts in notes.items() if _covers(parts)}


def _covers(parts: Iterable[tuple[int, int | None]]) -> bool:
    expected: int | None = 0
    for start, end in parts:
        if start != expected:
            return False
        expected = end
    return expected is None
