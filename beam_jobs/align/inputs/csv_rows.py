r"""Rows of CSV and TSV files. A malformed row costs itself; reading continues after it.

Python's reader is strict: a lenient one drops stray quotes, and joins the rows that an unclosed
cell swallows. If a malformed row's lines after the first begin and end with rows, a cell was not
closed. Else it is read again, with quotes amid text as text.

Spark writes `\"` for a quote: once a row reads only that way, all do. Spreadsheets omit empty last
cells; others end rows with a comma. A row that lacks cells is torn if an earlier one kept an empty
last cell, or a needed column is missing.
"""

import csv
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import BinaryIO, Literal, TextIO

from beam_jobs.align.inputs.decompression import DamageError, require_utf8
from beam_jobs.align.inputs.documents import Reason, UnusableError

HEAD_BYTES = 1 << 20
"""Of a TSV file, to see whether its quotes are quotes."""

OTHER_SEPARATORS = ";\t|"
"""Of files that are named as CSV."""

type CsvRow = list[str] | UnusableError
"""A row's cells, or why it can't be used."""

_BEGUN = re.compile(rb'(?:^|\t)"', re.MULTILINE)
# After a tab or at a line's start a quote begins a new cell and closes none.
_CLOSED = re.compile(rb'(?:^|\t)"(?:[^"]|"")*(?<![\t\n])"(?=\t|\r?$)', re.MULTILINE)
_OPEN, _LONG = "unexpected end of data", "field larger than field limit"
"""In messages of Python's reader: a cell is never closed, or is longer than allowed."""


def read_csv(
    data: BinaryIO, *, max_cell: int, head: bytes | None, needed: Collection[str]
) -> Iterator[CsvRow]:
    """Yield a file's header and rows; for a bad row, its error.

    Cells and lines have at most `max_cell` characters. Cells after the `needed` columns may be
    missing; without `needed`, none may. `head` begins a TSV file, None for CSV: if it leaves most
    quoted cells open, quotes are text. DamageError if reading can't continue.
    """
    require_utf8(data)
    csv.field_size_limit(max_cell)
    text = io.TextIOWrapper(data, "utf-8-sig", errors="surrogateescape", newline="")
    rows = partial(_Rows, _Lines(text, max_cell), needed=needed)
    num_begun = len(_BEGUN.findall(head or b""))
    closed = _CLOSED.findall(head or b"")
    # A cell that ends in a later line may do so by chance: then half isn't enough.
    twice = 2 * len(closed) - any(b"\n" in cell for cell in closed)
    if head is None or 0 < num_begun <= twice:
        yield from rows("\t" if head else ",").read()
    else:
        quoting: Literal[0, 3] = csv.QUOTE_NONE if num_begun else csv.QUOTE_MINIMAL
        yield from rows("\t", quoting, may_be_text=True).read()


class _CutLine(str):
    """The start of an overlong line."""


class _Lines:
    def __init__(self, text: TextIO, max_characters: int) -> None:
        self.taken: list[str] = []
        self._text, self._most = text, max_characters
        self._given_back: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._given_back.pop() if self._given_back else self._read()
        if not line:
            raise StopIteration
        self.taken.append(line)
        return line

    def give_back(self, lines: Sequence[str]) -> None:
        self._given_back += reversed(lines)

    def _read(self) -> str:
        line = rest = self._text.readline(self._most)
        while len(rest) == self._most and rest[-1] not in "\r\n":
            rest = self._text.readline(self._most)
            line = _CutLine(line)
        return line


class _Rows:
    def __init__(
        self,
        lines: _Lines,
        delimiter: str,
        quoting: Literal[0, 3] = 0,
        *,
        needed: Collection[str],
        may_be_text: bool = False,
    ) -> None:
        self._lines, self._delimiter, self._needed = lines, delimiter, needed
        self._width = self._least = 0
        self._escapes = False  # whether `\"` is a quote
        self._may_be_text = may_be_text  # as quotes are in TSV, unless its head shows otherwise
        self._reader = partial(csv.reader, delimiter=delimiter, quoting=quoting, strict=True)
        self._amid_text = re.compile(rf'(?<=[^{delimiter}\r\n"])"(?=[^{delimiter}\r\n"])')
        self._quoted = re.compile(rf'(?<![^{delimiter}\n])"(?:[^"]|"")*"(?![^{delimiter}\r\n])')

    def read(self) -> Iterator[CsvRow]:
        rows = self._reader(map(self._mend, self._lines))
        while True:
            lines: list[str] = []
            self._lines.taken, row, why = lines, None, ""
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                why = str(error)
                if not self._width:
                    if _has_other_separator(lines):  # one column, by which the file is refused
                        yield ["".join(lines).strip()]
                        return
                    raise DamageError(f"the header can't be read: {why}") from error
            if row and not self._width:
                self._width = self._least = len(row)
                places = [row.index(name) for name in self._needed if name in row]
                self._least = max(places, default=self._width - 1) + 1
            if row != []:  # blank lines aren't rows
                yield self._settle(lines, row, why)

    def _mend(self, line: str) -> str:
        return _unescape(line) if self._escapes else line

    def _settle(self, lines: list[str], row: list[str] | None, why: str) -> CsvRow:
        """Return the row that lines hold; give back others."""
        if any(type(line) is _CutLine for line in lines):
            self._lines.give_back(lines[1:])
            return UnusableError(Reason.TOO_LARGE, f"a line exceeds {len(lines[-1])} characters")
        if row is not None and len(row) >= self._width and not any(row[self._width :]):
            if not row[self._width - 1]:
                self._least = self._width  # empty cells aren't left out
            return row[: self._width]
        if not self._may_be_text and (read := self._read_otherwise(lines)):
            return read
        why = why or f"the row has {len(row or ())} columns, the header {self._width}"
        cells = lines[0].rstrip("\r\n").split(self._delimiter)
        if self._may_be_text and row is None and len(cells) == self._width:
            self._lines.give_back(lines[1:])
            return cells
        if lines[1:] and self._begins_row(lines[1]) and self._begins_row(lines[-1]):
            self._lines.give_back(lines[1:])
        elif why == _OPEN or why.startswith(_LONG):
            return self._pass_open_cell(lines, why)
        elif row is None:
            row, taken = self._try(lines, partial(self._amid_text.sub, '""'))
            self._take(taken[1:] if row else [], instead_of=lines[1:])
        elif self._least <= len(row) < self._width:
            return row
        return UnusableError(Reason.BAD_ROW, why)

    def _read_otherwise(self, lines: list[str]) -> list[str] | None:
        """Read a row with the other meaning of a backslash before quotes."""
        if not any('\\"' in line for line in lines):
            return None
        row, taken = self._try(lines, str if self._escapes else _unescape)
        behind = taken[1:]
        if row is None or (behind and self._begins_row(behind[0]) and self._begins_row(behind[-1])):
            return None
        self._escapes = True
        self._take(behind, instead_of=lines[1:])
        return row

    def _take(self, behind: Sequence[str], *, instead_of: Sequence[str]) -> None:
        self._lines.give_back(instead_of)
        for _ in behind:
            next(self._lines)

    def _begins_row(self, line: str) -> bool:
        """Whether a line begins a row, without quotes amid text."""
        row, taken = self._try([line])
        return bool(row) and '"' not in self._quoted.sub("", "".join(taken))

    def _try(
        self, lines: list[str], mend: Callable[[str], str] | None = None
    ) -> tuple[list[str] | None, list[str]]:
        """The row, if any, that begins with these lines, and its lines."""
        self._lines.give_back(lines)
        taken: list[str] = []
        self._lines.taken = taken
        try:
            row = next(self._reader(map(mend or self._mend, self._lines)), None)
        except csv.Error:
            row = None
        self._lines.give_back(taken)
        self._lines.taken = []
        for _ in lines:
            next(self._lines)
        return row if row and len(row) == self._width else None, taken

    def _pass_open_cell(self, lines: list[str], why: str) -> UnusableError:
        """Skip an unclosed or too long cell; DamageError if the file ends in it."""
        refused, line = UnusableError(Reason.TOO_LARGE, why), lines[-1]
        while why.startswith(_LONG):
            self._lines.give_back(['"' + line])  # within the cell, as before
            self._lines.taken, why = [], ""
            try:
                next(self._reader(self._lines))
            except csv.Error as error:
                why, line = str(error), self._lines.taken[-1]
        if why == _OPEN:
            num_bytes = sum(len(line.encode(errors="surrogateescape")) for line in lines)
            lost = f"a quoted cell in the last {num_bytes} bytes or more isn't closed"
            raise DamageError(f"{lost}: the file may be cut")
        return refused


def _unescape(line: str) -> str:
    return line.replace('\\"', '""')


def _has_other_separator(header: list[str]) -> bool:
    """Whether one of `OTHER_SEPARATORS` divides a header of quoted names."""
    for separator in OTHER_SEPARATORS:
        with suppress(csv.Error):
            names = next(csv.reader(header, delimiter=separator, strict=True), [])
            if len(names) > 1:
                return True
    return False
