"""Rows of tables of any format."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import BinaryIO, cast

from beam_jobs import storage
from beam_jobs.align.inputs.decompression import DamageError
from beam_jobs.align.inputs.documents import unreadable
from beam_jobs.align.inputs.formats import FORMATS
from beam_jobs.align.inputs.parts import InputFile, InputPart
from beam_jobs.align.inputs.table_format import Row, Shape, TableFormat, Wanted, as_damage


def read_shape(opened: BinaryIO, file: InputFile) -> Shape | None:
    """A table's `Shape`; None if damaged, which reading reports later."""
    try:
        table = _table_of(file)
        with as_damage(table.damage):
            return table.shape(opened, file)
    except DamageError:
        return None


def read_rows(
    part: InputPart, fields: Sequence[str], *, max_cell_bytes: int, needed: Sequence[str] = ()
) -> Iterator[tuple[int, Row]]:
    """Yield (row number, row) for a part, (row number, error) for damage.

    Missing columns are left out; a nested field brings its whole column.
    """
    position, wanted = 0, Wanted(fields, needed, max_cell_bytes)
    try:
        with storage.open_to_read(part.file.path) as opened:
            table = _table_of(part.file)
            with as_damage(table.damage, opened.tell):
                for row in table.rows(opened, part, wanted):
                    if isinstance(row, int):
                        position = row
                        continue
                    yield position, row
                    position += 1
    except DamageError as error:
        yield position, unreadable(error, part.file.num_bytes, error.num_read)


def count_rows(part: InputPart) -> tuple[int, int | None]:
    """`TableFormat.num_rows` of a part; (0, None) if unreadable."""
    try:
        table = _table_of(part.file)
        with storage.open_to_read(part.file.path) as opened, as_damage(table.damage):
            return table.num_rows(opened, part)
    except DamageError:
        return 0, None


def _table_of(file: InputFile) -> TableFormat:
    """A format's `TABLE`, loaded on demand."""
    module = import_module(f"beam_jobs.align.inputs.{FORMATS[file.format].table}")
    return cast(TableFormat, module.TABLE)
