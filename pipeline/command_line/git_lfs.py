"""Git LFS pointers, which a clone without `git lfs` has instead of large files."""

import os
import re

from pipeline.command_line.failures import hinted
from pipeline.command_line.pasted import pasted

POINTER_BYTES = 1024
"""A pointer is shorter than this, by its specification."""

_POINTER = re.compile(
    rb"version https://(?:git-lfs|hawser)\.github\.com/spec/v1\r?\n(?:ext-[^\n]+\n)*"
    rb"oid sha256:[0-9a-f]{64}\r?\nsize (\d+)\s*"
)


class PointerError(ValueError):
    """A Git LFS pointer instead of a file's content."""


def refuse_pointer(path: str, start: bytes) -> None:
    """Raise PointerError for a pointer.

    `start` is the file's first `POINTER_BYTES` or more, or all of it.
    """
    found = _POINTER.fullmatch(start) if len(start) < POINTER_BYTES else None
    if found is None:
        return
    error = PointerError(
        f"{path} is a Git LFS pointer to a file of {int(found[1])} bytes, not that file: fetch it "
        "with git lfs pull in the repository that it was cloned from"
    )
    folder = "" if "://" in path else os.path.dirname(path)
    raise hinted(error, f"git {f'-C {pasted(folder)} ' if folder else ''}lfs pull")
