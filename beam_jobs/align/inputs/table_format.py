"""How a table is read, whatever its format: what each format's own file gives."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from beam_jobs.align.inputs.decompression import DamageError
from beam_jobs.align.inputs.documents import UnusableError
from beam_jobs.align.inputs.parts import InputFile, InputPart
from beam_jobs.job_errors import InputError

type Row = dict[str, Any] | UnusableError
"""A row, or why it can't be used."""

type Shape = tuple[list[str], tuple[int, ...]]
"""Columns, and the uncompressed bytes of a parquet file's row groups."""

ROWS_PER_BATCH = 256
_COUNTED_BYTES = 16 << 20
"""Rows of a longer file that doesn't say how many it has are counted in its start."""


@dataclass(frozen=True)
class Wanted:
    """The columns to read; a row of CSV may lack cells after the needed ones."""

    fields: Sequence[str]
    needed: Sequence[str]
    max_cell_bytes: int


class TableFormat(NamedTuple):
    """How tables of a format are read; each function gets the open file first.

    Attributes:
        shape: gives a file's columns. InputError if it is sound and still can't be read here.
        rows: yields a part's rows, and a number before a row that doesn't follow the last.
        num_rows: gives a part's rows, or those at the start of a file without a recorded count,
            and the uncompressed bytes they take; None if they are all rows.
        damage: the errors by which its library says that a file is damaged. What `as_damage` names
            may be raised, too, and so may DamageError and failures of the storage; no others.
    """

    shape: Callable[[BinaryIO, InputFile], Shape]
    rows: Callable[[BinaryIO, InputPart, Wanted], Iterator[Row | int]]
    num_rows: Callable[[BinaryIO, InputPart], tuple[int, int | None]]
    damage: tuple[type[Exception], ...] = ()


@contextmanager
def as_damage(
    damage: tuple[type[Exception], ...] = (), tell: Callable[[], int] = int
) -> Iterator[None]:
    """Turn every error of a damaged table into DamageError; failures of the storage pass."""
    # A column's name need not be UTF-8.
    errors: tuple[type[Exception], ...] = (UnicodeDecodeError, *damage)
    try:
        yield
    except (DamageError, InputError):  # ValueErrors, as a library's own may be
        raise
    except errors as error:
        raise DamageError(str(error) or type(error).__name__, num_read=tell()) from error
    except MemoryError as error:  # has no message: a damaged length asks for anything
        text = "it asks for more memory than there is: its lengths are damaged, or it is too large"
        raise DamageError(text, num_read=tell()) from error
    except OSError as error:
        if error.errno is not None:  # Arrow's own, which are about damage, have none
            raise
        raise DamageError(str(error), num_read=tell()) from error


def count_until(file: BinaryIO, counts: Iterable[int]) -> tuple[int, int | None]:
    """Add counts up until enough of a file is read: the rows, and the bytes that they take."""
    total = 0
    for count in counts:
        total += count
        if file.tell() >= _COUNTED_BYTES:
            return total, file.tell()
    return total, None
