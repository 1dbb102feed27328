"""How a command reports an error: a message, a hint to paste, a traceback with --debug.

The hint is a note of the error, for programs, too.
"""

import errno
import os
import sys
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

HINT = "hint: "

with_traceback = False
"""Set by `vocag --debug`."""

left_behind: "list[threading.Thread]" = []
"""An abandoned job's threads, for which the process doesn't wait."""


def printable(text: str) -> str:
    """Escape control characters and lone surrogates, which could control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def hinted[E: BaseException](error: E, hint: str) -> E:
    """Add an error's last line: a command or an option to paste."""
    error.add_note(HINT + hint.replace("\n", " "))
    return error


@contextmanager
def naming(path: str) -> "Iterator[None]":
    """Add the file's name to a system error without one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = path
        raise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0].rstrip()


def report(who: str, error: BaseException, message: str = "") -> None:
    """Print an error, or a message instead, its notes and its hint, one line each, on stderr."""
    if with_traceback:
        import traceback

        traceback.print_exception(error)
    print(printable(f"{who}: {message or _in_words(error)}"), file=sys.stderr)
    notes = (note for note in getattr(error, "__notes__", ()) if not note.startswith(HINT))
    for note in notes:
        print(printable(note), file=sys.stderr)
    for hint in hints_of(error) or _hints_of_path(error):
        print(printable(hint), file=sys.stderr)


def hints_of(error: BaseException) -> list[str]:
    """Return the hints of an error, or of its first cause with any."""
    for each in causes_of(error):
        found = [note for note in getattr(each, "__notes__", ()) if note.startswith(HINT)]
        if found:
            return list(map(printable, found))
    return []


def causes_of(error: BaseException) -> "Iterator[BaseException]":
    """Yield an error, its cause, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )


FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
"""Numbers of system errors."""

_SYSTEM = {
    errno.EROFS: "is on a file system that can only be read: name a folder that can be written to",
    errno.ENOSPC: "can't be written, for its disk is full: free some space",
    errno.EDQUOT: "can't be written, for your quota is used up: free some space",
    errno.EFBIG: "would be larger than ulimit -f, or its file system, allows: raise it",
    errno.EEXIST: "is there already: name another",
    errno.ENOTDIR: "is below a file, where a folder is to be: name another",
    errno.EISDIR: "is a folder, where a file is to be: name a file",
    errno.EACCES: "is closed to you by its permissions: change them, or name another",
}


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.EMFILE:  # often without a file's name
        return f"{error}: raise ulimit -n"
    if not isinstance(error, OSError) or not isinstance(error.filename, (str, bytes)):
        if isinstance(error, OSError) and error.errno == errno.ENOENT and not _has_folder():
            return "the folder where this was started is gone: cd to another"
        if isinstance(error, FileNotFoundError) and "temporary directory" in str(error.strerror):
            return f"{error.strerror}: free some space there, or let TMPDIR name another folder"
        return str(error)
    path = os.fsdecode(error.filename)
    folder = os.path.dirname(path)
    if error.errno == errno.ENOENT and folder and "://" not in path and not os.path.isdir(folder):
        return f"{path}: there is no folder {folder}"
    return f"{path} {_SYSTEM[error.errno]}" if error.errno in _SYSTEM else str(error)


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _hints_of_path(error: BaseException) -> list[str]:
    path = error.filename if isinstance(error, FileNotFoundError) else None
    if not isinstance(path, str) or "://" in path:
        return []
    from pipeline.command_line.nearest import look_near

    return [HINT + look_near(path)]
