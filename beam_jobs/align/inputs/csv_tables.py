"""CSV and TSV files as tables."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import BinaryIO

from beam_jobs.align.inputs.csv_rows import HEAD_BYTES, CsvRow, read_csv
from beam_jobs.align.inputs.decompression import DamageError, decompress
from beam_jobs.align.inputs.documents import UnusableError
from beam_jobs.align.inputs.parts import InputFile, InputPart
from beam_jobs.align.inputs.table_format import Row, Shape, TableFormat, Wanted, count_until

_HEADER_BYTES = 1 << 30


def _csv_rows(opened: BinaryIO, part: InputPart, wanted: Wanted) -> Iterator[Row]:
    rows = _read_csv(opened, part.file, wanted.max_cell_bytes, needed=wanted.needed)
    header = next(rows, [])
    if isinstance(header, UnusableError):
        raise DamageError(f"the header can't be read: {header.detail}")
    places = [(name, header.index(name)) for name in wanted.fields if name in header]
    for cells in rows:
        if isinstance(cells, UnusableError):
            yield cells
            continue
        yield {name: cells[column] for name, column in places if column < len(cells)}


def _csv_shape(opened: BinaryIO, file: InputFile) -> Shape:
    header = next(_read_csv(opened, file, _HEADER_BYTES), [])
    return header if isinstance(header, list) else [], ()


def _csv_count(opened: BinaryIO, part: InputPart) -> tuple[int, int | None]:
    rows = _read_csv(opened, part.file, _HEADER_BYTES)
    return count_until(opened, (1 for _ in islice(rows, 1, None)))


def _read_csv(
    opened: BinaryIO, file: InputFile, max_cell_bytes: int, *, needed: Sequence[str] = ()
) -> Iterator[CsvRow]:
    head = None if file.format == "csv" else b""
    if head is not None:
        with suppress(DamageError):
            head = decompress(opened, file.compression).read(HEAD_BYTES)
        opened.seek(0)
    data = decompress(opened, file.compression)
    return read_csv(data, max_cell=max_cell_bytes, head=head, needed=needed)


TABLE = TableFormat(_csv_shape, _csv_rows, _csv_count)
