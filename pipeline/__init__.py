"""vocag's library: tokenize, align, pack, stream, guide, validate."""

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent


def provide_kernel_cache() -> None:
    """Give numba a cache folder if it would find none, and each process would compile.

    numba writes next to the source, else below the user's cache folder. This one is temporary, and
    must be ours alone: numba runs what it finds there.
    """
    if "NUMBA_CACHE_DIR" in os.environ or any(map(_can_write, (PACKAGE / "__pycache__", _home()))):
        return
    import tempfile  # seldom needed, and slower to import than all of the above

    try:
        folder = Path(tempfile.gettempdir(), f"vocag-kernels-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            folder = Path(tempfile.mkdtemp(prefix="vocag-kernels-"))
    except OSError:  # the temporary folder, too, is full, gone or read-only
        return
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    if "numba" in sys.modules:  # which has read the environment already
        sys.modules["numba"].config.CACHE_DIR = str(folder)


def _home() -> Path:
    # Path's own raises where no home is known.
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))


def _can_write(folder: Path) -> bool:
    if not folder.is_absolute():  # a home that nobody knows
        return False
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)


provide_kernel_cache()
