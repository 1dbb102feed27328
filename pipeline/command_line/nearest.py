"""Suggest the nearest existing path, or a look at its folder."""

import os
from contextlib import suppress
from itertools import islice

from pipeline.command_line.pasted import pasted

_MOST_NAMES = 10_000
"""Names compared in a folder; more would take longer than looking."""

_ALIKE = 0.75
"""difflib's ratio: two exchanged letters of four are a slip, smollm2 for phi2 is not."""


def nearest(path: str) -> str | None:
    """Replace each missing part of a path by a similar existing name.

    None for a URL, an existing path, or without a similar name.
    """
    if "://" in path or _is_there(path):
        return None
    found = "/" if path.startswith("/") else ""
    for name in filter(None, path.split("/")):
        if not _is_there(os.path.join(found, name)):
            like = _like(name, os.path.expanduser(found) or ".")
            if like is None:
                return None
            name = like
        found = os.path.join(found, name)
    return found


def look_near(path: str) -> str:
    """Return the nearest local path, or the command that lists its folder."""
    found = nearest(path)
    if found is not None:
        return f"{pasted(found)}  # the nearest name"
    folder = path
    while folder and not _is_there(folder):
        folder = os.path.dirname(folder.rstrip("/"))
    return f"ls {pasted(folder or '.')}"


def _is_there(path: str) -> bool:
    return os.path.lexists(os.path.expanduser(path))


def _like(name: str, folder: str) -> str | None:
    from difflib import get_close_matches  # only for an error

    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MOST_NAMES)]
        # Other digits are another version, not a slip: llama2 isn't a misspelt llama3.
        same = [other for other in sorted(names) if _digits(other) == _digits(name)]
        return next(iter(get_close_matches(name, same, 1, _ALIKE)), None)
    return None


def _digits(name: str) -> list[str]:
    return [character for character in name if character.isdigit()]
