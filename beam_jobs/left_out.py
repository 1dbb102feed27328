"""Documents that a job left out."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import orjson

from beam_jobs import storage
from beam_jobs.job_errors import TooManyDeadLettersError
from pipeline.drawing.formatting import format_count, format_share
from schemas.manifest import Manifest, totals_of

DUPLICATE_OF = "the id was first used at "
"""Begins a duplicate's detail; the place of the first use follows."""

UNREAD = "unreadable_input"
"""The reason for a loss of unknown size."""

UNUSABLE = "nothing_usable"
"""The reason for a file without a usable document; its documents are listed, too."""

OF_FILES = frozenset({UNREAD, UNUSABLE})
"""Reasons that don't count documents."""

EXPECTED = frozenset({"known_id", UNUSABLE})
"""Reasons that aren't a loss: the dataset has the id, or the file's documents are counted."""

_MAX_NAMED = 3


def describe_place(letter: Mapping[str, Any]) -> str:
    """A dead letter's place: its line, or source and position.

    Example:
        >>> describe_place({"source": "a.jsonl", "position": 90, "line": 3})
        'a.jsonl line 3'
    """
    if letter.get("reason") == UNUSABLE:
        return str(letter["source"])
    line = letter.get("line")  # null if the input has no lines
    return f"{letter['source']} line {line}" if line else f"{letter['source']}#{letter['position']}"


def describe_reasons(path: str) -> str:
    """Count lost documents by reason, with the first of each."""
    lost: Counter[str] = Counter()
    first: dict[str, str] = {}
    with storage.open_to_read(path) as lines:
        for letter in map(orjson.loads, lines):
            lost[letter["reason"]] += 1
            first.setdefault(letter["reason"], f"{describe_place(letter)}: {letter['detail']}")
    by_reason = sorted(count_lost(lost).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(
        f"{reason} {format_count(count)} (first: {first[reason]})" for reason, count in by_reason
    )


def count_reasons(path: str) -> Counter[str]:
    """Count dead letters by reason."""
    with storage.open_to_read(path) as lines:
        return Counter(orjson.loads(line)["reason"] for line in lines)


def find_unread(path: str) -> list[str]:
    """List unreadable and unusable files among dead letters."""
    with storage.open_to_read(path) as lines:
        letters = [each for each in map(orjson.loads, lines) if each["reason"] in OF_FILES]
    return [f"{describe_place(letter)}: {letter['detail']}" for letter in letters]


def require_all_read(path: str, *, max_share: float) -> None:
    """Raise TooManyDeadLettersError for an unreadable or unusable file, unless `max_share` is 1."""
    unread = find_unread(path)
    if unread and max_share < 1:
        more = f"; and {format_count(len(unread) - _MAX_NAMED)} more" * (len(unread) > _MAX_NAMED)
        raise TooManyDeadLettersError(
            f"not all of the input can be read: {'; '.join(unread[:_MAX_NAMED])}{more}; repair "
            "these files or leave them out, or accept any loss with --max-dead-letters 1; all else "
            f"is done, {path} names each place"
        )


def require_few_left_out(manifest: Manifest, *, max_share: float, output: str) -> None:
    """Raise TooManyDeadLettersError if more input is lost than allowed, or unreadable."""
    letters = storage.join(output, manifest.dead_letters.file)
    if OF_FILES & manifest.dead_letters.by_reason.keys():
        require_all_read(letters, max_share=max_share)
    num_lost, num_documents = share_lost(manifest)
    if num_lost <= max_share * num_documents:
        return
    lost = count_lost(manifest.dead_letters.by_reason)
    # A growing dataset keeps its rule for ids.
    advice = (
        "if each file numbers its own documents, name them by file and place with --id-field ''; "
    )
    raise TooManyDeadLettersError(
        f"{format_count(num_lost)} of {format_count(num_documents)} documents "
        f"({format_share(num_lost, num_documents)}) are left out, more than --max-dead-letters "
        f"{100 * max_share:.6g} %: {describe_reasons(letters)}; "
        f"{advice if 'duplicate_id' in lost and not manifest.generation else ''}"
        "the dataset is written without "
        f"them, {letters} names each"
    )


def share_lost(manifest: Manifest) -> tuple[int, int]:
    """Return how many documents the newest input lost, and how many it had."""
    letters = manifest.dead_letters
    num_documents = totals_of(manifest.newest_shards)["num_documents"]
    num_documents += letters.count - letters.by_reason.get(UNUSABLE, 0)
    return count_lost(letters.by_reason).total(), num_documents


def count_lost(by_reason: Mapping[str, int]) -> Counter[str]:
    """Count lost documents by reason, without `EXPECTED` losses.

    Example:
        >>> count_lost({"known_id": 7, "bad_json": 1})
        Counter({'bad_json': 1})
    """
    return Counter({reason: n for reason, n in by_reason.items() if reason not in EXPECTED})
