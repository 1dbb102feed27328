"""The formats of input files, a line each; a table's readers have a module.

None is loaded here: options and help need only names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class FileFormat:
    """A kind of input file.

    Attributes:
        name: for `--format`.
        suffixes: endings of file names.
        what: content, for the help, or "".
        table: module next to this one whose `TABLE` reads it, or "".
        first_bytes: pattern of its first bytes, which then decide, or b"".
        expansion: rough bytes of text per byte of a format with its own compression, which can't be
            compressed as a whole; else None.
        is_untyped: whether all cells are text.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    what: str = ""
    table: str = ""
    first_bytes: bytes = b""
    expansion: float | None = None
    is_untyped: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether it has its own compression."""
        return self.expansion is not None


_JSON = "one object a line; .json also an array or one object"
_ALL = (
    FileFormat("jsonl", (".jsonl", ".ndjson", ".json"), _JSON),
    FileFormat("json"),  # values that aren't lines, found by looking into the file
    FileFormat("text", (".txt",), "one document a file"),
    FileFormat("csv", (".csv",), "with a header", "csv_tables", is_untyped=True),
    FileFormat("tsv", (".tsv",), "with a header", "csv_tables", is_untyped=True),
    FileFormat("parquet", (".parquet",), "", "parquet_tables", rb"PAR1[\0-\x1f]", 3.0),
    FileFormat("arrow", (".arrow", ".feather"), "", "arrow_tables", rb"ARROW1\0\0", 1.0),
    FileFormat("avro", (".avro",), "", "avro_tables", rb"Obj\x01", 2.0),
    FileFormat("dataset"),  # one of a dataset's shards
)
FORMATS = {each.name: each for each in _ALL}
if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[*FORMATS]


def format_of_suffix(suffix: str) -> str | None:
    """Format of a file name's ending, or None.

    Example:
        >>> format_of_suffix(".Feather")
        'arrow'
    """
    return next((each.name for each in _ALL if suffix.lower() in each.suffixes), None)


def format_of_bytes(head: bytes) -> str | None:
    """Format that first bytes show, or None."""
    found = (each for each in _ALL if each.first_bytes and re.match(each.first_bytes, head))
    return next((each.name for each in found), None)


def name_suffixes() -> str:
    """Known endings, for a message."""
    plain, own = (", ".join(_suffixes(is_packed=each)) for each in (False, True))
    return f"{plain} (each also .gz, .zst, .bz2 or .xz), {own}"


def describe_formats() -> str:
    """Readable files, for the help."""
    named = [
        " and ".join(each.suffixes) + (f" ({each.what})" if each.what else "")
        for each in _ALL
        if each.suffixes and not each.is_packed
    ]
    packed = ", ".join(_suffixes(is_packed=True))
    return f"{', '.join(named)}, each also .gz, .zst, .bz2 or .xz; {packed}"


def _suffixes(*, is_packed: bool) -> Iterator[str]:
    return (suffix for each in _ALL if each.is_packed is is_packed for suffix in each.suffixes)
