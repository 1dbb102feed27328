"""Refuse symbolic links in output places: a foreign dataset's could lead anywhere."""

import os

from pipeline.command_line.failures import hinted
from pipeline.command_line.pasted import pasted


class LinkError(ValueError):
    """A symbolic link in the place of an output."""


def refuse_link(path: str) -> None:
    """Raise LinkError for a symbolic link, dangling or not."""
    if os.path.islink(path):
        error = LinkError(
            f"{path} is a symbolic link to {os.readlink(path)}, and vocag would write there: it "
            "writes only in the folder itself; remove the link, which leaves what it names"
        )
        raise hinted(error, f"rm {pasted(path)}")


def refuse_linked_folders(folder: str) -> None:
    """Raise LinkError for a link to a folder, anywhere in this one.

    Files are replaced, not written through, so links to them may stay.
    """
    for above, names, _ in os.walk(folder):
        for name in names:
            refuse_link(os.path.join(above, name))


def open_unlinked(path: str, flags: int) -> int:
    """Open a file as `open(…, opener=open_unlinked)`; LinkError for a link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError:
        refuse_link(path)
        raise
