"""stdout and stderr that survive a reader who leaves."""

import errno
import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Buffer

_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""A pipe without a reader (`| head`), and a terminal that is gone."""


def outlive_readers() -> None:
    """Let stdout and stderr drop output that nobody reads, so a job doesn't end for it.

    Characters beyond a terminal's encoding are escaped. Closed ones (`>&-`) become silent: files
    would get their numbers, and with these what libraries and other processes print.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # the lowest free number is its own
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _tolerant(sys.stdout)
    if isinstance(sys.stderr, TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _tolerant(sys.stderr)


def _tolerant(stream: TextIOWrapper) -> TextIOWrapper:
    stream.flush()
    return TextIOWrapper(
        BufferedWriter(_Tolerant(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Tolerant(FileIO):
    # typeshed takes FileIO for an IO[bytes] as well, whose `write` never returns None
    def write(self, data: "Buffer", /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            # What is still buffered would fail again as Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if error.errno not in _NOBODY_READS:
                error.filename = "standard output" if self.fileno() == 1 else "standard error"
                raise
        return super().write(data)
