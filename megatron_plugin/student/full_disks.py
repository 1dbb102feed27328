"""Say that a disk is full, if that is why a run failed.

Megatron's checkpoint writers report it as a failed write of some tensor, or not at all.
"""

import errno
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from traceback import format_exception

logger = logging.getLogger(__name__)

_CAUSES = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_NEARLY_FULL_BYTES = 16 << 20


def explain_full_disks(
    error: BaseException,
    folders: Iterable[str | Path | None],
    *,
    nearly_full_bytes: int = _NEARLY_FULL_BYTES,
) -> None:
    """Log which of a run's folders have no space left, and note it in the error.

    Args:
        error: that ends the run.
        folders: that the run writes to; None for those that it doesn't.
        nearly_full_bytes: free bytes below which a disk counts as full.

    Example:
        >>> explain_full_disks(error, [args.save, args.tensorboard_dir])
    """
    free = {folder: _free_bytes(Path(folder)) for folder in folders if folder}
    full = [folder for folder, num_bytes in free.items() if num_bytes < nearly_full_bytes]
    told = "".join(format_exception(error))  # its causes, too
    if full or any(cause in told for cause in _CAUSES):
        listed = ", ".join(f"{folder} ({free[folder] >> 20} MiB free)" for folder in full or free)
        message = f"no space is left on the disk of {listed}: make room or name another folder"
        logger.error(message)
        error.add_note(message)


def _free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that a folder lies on, or will lie on."""
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
