"""The user's cache folder, for slow results."""

import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_folder(name: str) -> Path:
    """Return `$XDG_CACHE_HOME/vocag/NAME`; it need not exist."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~/.cache"))
    return home / "vocag" / name


def keep(path: Path, text: str) -> None:
    """Write a cache file whole, if possible."""
    if not path.is_absolute():  # no home is known
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Deleted at the end, unless renamed by then.
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, delete_on_close=False
        ) as file:
            file.write(text)
            file.close()
            os.replace(file.name, path)
    except OSError as error:
        logger.info("%s can't be written (%s): the next process tries again", path, error)
