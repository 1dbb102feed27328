"""Replace a run's files whole."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from pipeline.command_line.failures import FULL_DISK, naming
from pipeline.drawing.formatting import format_bytes


class DiskFullError(OSError):
    """A run's output doesn't fit on the disk; earlier output stays."""


@contextmanager
def replacing(path: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a path for a file or folder of about `num_bytes`, which then replaces `path`.

    A link stays; what it names is replaced. DiskFullError without room, before writing if possible.
    """
    place = path.resolve()
    temporary, old = (place.with_name(f".{place.name}.{end}") for end in ("tmp", "old"))
    _remove(temporary)
    if old.exists() and not place.exists():
        os.replace(old, place)  # a kill came between the two renames below
    _remove(old)
    place.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place.parent).free
    needs = f"{path} needs {format_bytes(num_bytes)} of disk"
    if free < num_bytes:
        raise DiskFullError(f"{needs}, {format_bytes(free)} are free: make room")
    try:
        with naming(str(path)):
            yield temporary
    except (OSError, SafetensorError) as error:
        if is_full(error):
            raise DiskFullError(f"{needs}, and the disk is full: make room") from error
        if isinstance(error, SafetensorError):
            raise OSError(f"{path} can't be written: {error}") from error
        raise
    else:
        if place.is_dir():
            os.replace(place, old)  # a kill leaves no half of it under its name
        os.replace(temporary, place)
        _remove(old)
    finally:
        _remove(temporary)  # hidden, and as large


def is_full(error: OSError | SafetensorError) -> bool:
    """Whether an error says that a disk is full."""
    if isinstance(error, OSError):
        return error.errno in FULL_DISK
    return any(f"os error {number})" in str(error) for number in FULL_DISK)  # Rust's message


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    with suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()
