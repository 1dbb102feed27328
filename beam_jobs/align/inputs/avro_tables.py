"""Avro object container files, block by block.

An undecodable block costs itself. One that can't be decompressed, or has a wrong length, ends the
reading. Lost last blocks go unnoticed: Avro has no end mark.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from lzma import LZMAError
from typing import Any, BinaryIO, cast
from uuid import UUID
from zlib import error as zlib_error

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException, parse_schema

from beam_jobs.align.inputs.arrow_rows import as_text
from beam_jobs.align.inputs.decompression import DamageError, zstd
from beam_jobs.align.inputs.documents import Reason, UnusableError
from beam_jobs.align.inputs.parts import InputFile, InputPart
from beam_jobs.align.inputs.table_format import (
    Row,
    Shape,
    TableFormat,
    Wanted,
    as_damage,
    count_until,
)
from beam_jobs.job_errors import InputError

# Damaged bytes reach decoders and the schema's parser, which check few of them.
_DAMAGE = (
    *(EOFError, LZMAError, zlib_error, zstd.ZstdError, SchemaParseException),
    *(ArithmeticError, RecursionError),
    *(ValueError, LookupError, TypeError, AttributeError),
)
_NOT_INSTALLED = "you need to install"
"""In fastavro's message for a codec without its library."""


def _avro_shape(opened: BinaryIO, file: InputFile) -> Shape:
    blocks = _open_blocks(opened)
    try:
        next(iter(blocks), None)
    except ValueError as error:
        if _NOT_INSTALLED in str(error):
            raise InputError(f"{file.path} can't be read: {error}") from error
        raise
    return [str(field["name"]) for field in _fields(blocks.writer_schema)], ()


def _avro_count(opened: BinaryIO, _: InputPart) -> tuple[int, int | None]:
    return count_until(opened, (block.num_records for block in _open_blocks(opened)))


def _avro_rows(opened: BinaryIO, _: InputPart, wanted: Wanted) -> Iterator[Row | int]:
    """Yield rows, and a row number before each block."""
    num_bytes = opened.seek(0, io.SEEK_END)
    opened.seek(0)
    blocks = _open_blocks(opened)
    roots = {field.split(".")[0] for field in wanted.fields}
    fixed = _fixed_fields(blocks.writer_schema) & roots
    end, num_read = 0, None
    for block in cast(Iterable[Any], blocks):
        position, end = end, end + block.num_records
        num_read = block.offset + block.size
        yield position
        why = "it is cut"
        try:
            with as_damage(_DAMAGE):
                for record in block:
                    values = {name: record[name] for name in roots & record.keys()}
                    yield {
                        name: value.hex() if name in fixed and value is not None else _plain(value)
                        for name, value in values.items()
                    }
                    position += 1
        except DamageError as error:
            why = str(error)
        if position < end:
            lost = f"rows {position} to {end - 1}, {end - position} of one block,"
            yield UnusableError(Reason.UNREADABLE_INPUT, f"{lost} can't be read: {why}")
        elif block.bytes_.read(1):  # the library reads only as many records as a block declares
            lost = "a block holds more bytes than its records: some are lost"
            yield UnusableError(Reason.UNREADABLE_INPUT, lost)
    if num_read is not None and num_read != num_bytes:  # the library ends in silence here
        raise DamageError("it ends amid a block: the file is cut", num_read=num_read)


def _open_blocks(opened: BinaryIO) -> fastavro.block_reader:
    # Strings that aren't UTF-8 become lone surrogates, by which a document is refused later.
    return fastavro.block_reader(opened, handle_unicode_errors="surrogateescape")


def _fields(schema: Any) -> list[Mapping[str, Any]]:
    is_record = isinstance(schema, Mapping) and schema.get("type") == "record"
    return list(schema["fields"]) if is_record else []


def _fixed_fields(schema: Any) -> set[str]:
    """Fields of fixed-length bytes without a logical type."""
    named: dict[str, Any] = {}
    parse_schema(schema, named_schemas=named)

    def is_fixed(kind: Any) -> bool:
        if isinstance(kind, list):
            return any(map(is_fixed, kind))
        kind = named.get(kind, kind) if isinstance(kind, str) else kind
        if not isinstance(kind, Mapping):
            return False
        return kind["type"] == "fixed" and "logicalType" not in kind

    return {str(field["name"]) for field in _fields(schema) if is_fixed(field["type"])}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime | date | time | Decimal):
        return as_text(pa.array([value])).to_pylist()[0]
    return str(value) if isinstance(value, UUID) else value


TABLE = TableFormat(_avro_shape, _avro_rows, _avro_count, _DAMAGE)
