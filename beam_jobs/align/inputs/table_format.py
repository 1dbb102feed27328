"""What each table format's module provides."""

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
"""Without a recorded count, a longer file's rows are counted in its start."""


@dataclass(frozen=True)
class Wanted:
    """Columns to read; a CSV row may lack cells after the `needed` ones."""

    fields: Sequence[str]
    needed: Sequence[str]
    max_cell_bytes: int


class TableFormat(NamedTuple):
    """How tables of a format are read; each function gets the open file first.

    Attributes:
        shape: gives columns and row groups. InputError if a sound file can't be read here.
        rows: yields a part's rows, and a row number before one that doesn't follow the last.
        num_rows: gives a part's number of rows and None; without a recorded count, those at the
            file's start and their uncompressed bytes.
        damage: its library's errors for damage. Functions also raise those of `as_damage`,
            DamageError and the storage's failures; no others.
    """

    shape: Callable[[BinaryIO, InputFile], Shape]
    rows: Callable[[BinaryIO, InputPart, Wanted], Iterator[Row | int]]
    num_rows: Callable[[BinaryIO, InputPart], tuple[int, int | None]]
    damage: tuple[type[Exception], ...] = ()


@contextmanager
def as_damage(damage: tuple[type[Exception], ...], tell: Callable[[], int] = int) -> Iterator[None]:
    """Turn errors of a damaged table into DamageError; failures of the storage pass."""
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
        if error.errno is not None:  # Arrow's own errors, of damage, have none
            raise
        raise DamageError(str(error), num_read=tell()) from error


def count_until(file: BinaryIO, counts: Iterable[int]) -> tuple[int, int | None]:
    """Add up counts in a limited part of a file; return rows, and their bytes or None."""
    total = 0
    for count in counts:
        total += count
        if file.tell() >= _COUNTED_BYTES:
            return total, file.tell()
    return total, None
