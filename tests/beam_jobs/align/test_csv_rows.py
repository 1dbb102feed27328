"""Rows of CSV and TSV files: a malformed one costs itself, and no other."""

import csv
import io
import re
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from beam_jobs.align.inputs.csv_rows import read_csv
from beam_jobs.align.inputs.decompression import DamageError
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.parts import InputPart
from beam_jobs.align.inputs.tables import read_rows
from beam_jobs.job_errors import InputError
from pipeline.command_line.failures import hints_of

ROWS = [[f"d{n}", f"text {n}, with\n{n % 3} lines" if n % 2 else f"text {n}"] for n in range(40)]
HEADER = "id,text\n"


def quoted(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f'{name},"{text}"\n' for name, text in rows]


def plain(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"{name},{text.replace(',', '').replace(chr(10), ' ')}\n" for name, text in rows]


def read(
    text: str,
    *,
    max_cell: int = 1000,
    is_tsv: bool = False,
    num_head: int = 1 << 20,
    needed: Sequence[str] = (),
) -> tuple[list[list[str]], int]:
    """Return rows, and how many were refused."""
    data = text.encode()
    head = data[:num_head] if is_tsv else None
    rows = read_csv(
        io.BufferedReader(io.BytesIO(data)), max_cell=max_cell, head=head, needed=needed
    )
    _, *found = rows
    good = [row for row in found if isinstance(row, list)]
    return good, len(found) - len(good)


in_dialect = partial(read, needed=("id", "text"))


def tsv(rows: Sequence[Sequence[str]]) -> str:
    return "".join("\t".join(row) + "\n" for row in [["id", "text"], *rows])


BAD = [
    'd20,"she said "hello" and left"\n',
    'd20,"she said "hello, you" and left"\n',
    'd20,"she said "hello", and left"\n',
    'd20,"two lines\nshe said "hello, you" and left,\nYes, she did.\nand more"\n',
    'd20,"never closed\n',
    'd20,"too long ' + "x" * 2000 + '"\n',
    'd20,"too long\n' + "one, two, three\n" * 200 + '"\n',
    "d20,three,columns\n",
    "d20\n",
]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("write", [quoted, plain])
def test_a_bad_row_costs_that_row(bad: str, write: object) -> None:
    lines = write(ROWS)  # type: ignore[operator]
    expected, _ = read(HEADER + "".join(lines))
    assert len(expected) == 40
    found, num_refused = read(HEADER + "".join([*lines[:20], bad, *lines[21:]]))
    assert found == [*expected[:20], *expected[21:]]
    assert num_refused == 1


def test_bad_rows_in_a_row_cost_themselves() -> None:
    lines = quoted(ROWS)
    lines[20:23] = BAD[4], BAD[0], BAD[4]
    found, num_refused = read(HEADER + "".join(lines))
    assert found == [*ROWS[:20], *ROWS[23:]]
    assert num_refused == 3


@pytest.mark.parametrize("left_out", [1, 2, 5])
def test_a_file_that_ends_within_a_cell_may_be_cut(left_out: int) -> None:
    text = HEADER + "".join(quoted(ROWS))
    with pytest.raises(DamageError, match="may be cut"):
        read(text[:-1][:-left_out])
    with pytest.raises(DamageError, match="may be cut"):
        read(HEADER + 'a,"' + "some prose\n" * 500, max_cell=100)


NEVER_CLOSED = ['"never closed', '"Yes," she said', '"Hello"', '"', 'a "b" c', '"a" "b"']


@pytest.mark.parametrize(
    ("cell", "others"),
    [*((cell, '"No," he said {}') for cell in NEVER_CLOSED), ('"never closed', "text {}")],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_quotes_of_tsv_are_text_where_they_do_not_close(
    cell: str, others: str, is_last: bool
) -> None:
    """Behind the head that is looked at, too; and where the file ends at once."""
    rows = [[f"d{n}", others.format(n)] for n in range(40)]
    rows[39 if is_last else 20][1] = cell
    text = tsv(rows).removesuffix("\n" if is_last else "")
    for num_head in (100, len(text)):
        assert read(text, is_tsv=True, num_head=num_head) == (rows, 0)


@pytest.mark.parametrize(
    "texts", [["text 0", '" 1', '"'], ['" 0', "text 1", '" 2', 'text 3"', "text 4"]]
)
def test_a_quote_of_a_later_row_closes_no_cell_of_tsv(texts: list[str]) -> None:
    """One that begins a cell, where the file is cut right behind it; or that ends one."""
    rows = [[f"d{n}", text] for n, text in enumerate(texts)]
    assert read(tsv(rows)[:-1], is_tsv=True) == (rows, 0)


def test_a_quoted_cell_of_two_that_is_damaged_costs_itself() -> None:
    text = 'id\ttext\nd0\tplain\nd1\t""" 1"\nd2\t""" 2"\x1a'
    assert read(text, is_tsv=True) == ([["d0", "plain"], ["d1", '" 1']], 1)


def test_quotes_of_tsv_are_quotes_where_they_close() -> None:
    rows = [[f"d{n}", f"a\ttab {n}\nand a line"] for n in range(40)]
    lines = [f'{name}\t"{text}"\n' for name, text in rows]
    assert read("id\ttext\n" + "".join(lines), is_tsv=True) == (rows, 0)
    lines[20] = 'd20\t"she said "hello" x"\n'
    found, num_refused = read("id\ttext\n" + "".join(lines), is_tsv=True)
    assert (found, num_refused) == ([*rows[:20], *rows[21:]], 1)


def test_a_header_that_is_no_row_says_so() -> None:
    with pytest.raises(DamageError, match="the header can't be read"):
        read('"a"b,c\n1,2\n')


@pytest.mark.parametrize("separator", [";", "|"])
def test_another_separator_is_named_where_names_are_quoted(tmp_path: Path, separator: str) -> None:
    """The command that the hint gives makes a file whose ids and texts are found."""
    path = tmp_path / "a b.csv"
    lines = ['\ufeff"id"S"text"', '"x1"S"a;b"', '"x2"S"c"""']
    path.write_text("".join(f"{line}\r\n".replace("S", separator) for line in lines), "utf-8")
    with pytest.raises(InputError, match=f'its separator is "{re.escape(separator)}"') as error:
        find_inputs([str(path)], fields=("text",))
    (hint,) = hints_of(error.value)
    subprocess.run(hint.removeprefix("hint: "), shell=True, check=True)
    (file,) = find_inputs([f"{path}.csv"], fields=("text", "id"))
    rows = [row for _, row in read_rows(InputPart(file), ["id", "text"], max_cell_bytes=100)]
    assert rows == [{"id": "x1", "text": "a;b"}, {"id": "x2", "text": 'c"'}]


SPARK_TEXTS = [
    'she said "hi", then left',
    '"quoted" whole',
    'ends with "quotes"',
    '"',
    'two\nlines, "both" here\nand a third "',
    "no quote, a comma",
    "plain",
    r"a path C:\dir and \n",
    r"a backslash before \" a quote",
    '{"json": "text", "n": [1, 2]}',
    "",
]


def write_spark(row: Sequence[str]) -> str:
    """Write a row as Spark does: quotes where they are needed, and a backslash before each."""
    cells = [
        '"' + cell.replace('"', '\\"') + '"' if not cell or set(cell) & set('",\n') else cell
        for cell in row
    ]
    return ",".join(cells) + "\n"


@pytest.mark.parametrize("last", [[], ["x"], [""], ['"', "a, b"]])
def test_the_dialect_of_spark_is_read(last: list[str]) -> None:
    rows = [[f"d{n}", text, *last] for n, text in enumerate(SPARK_TEXTS * 3)]
    header = ["id", "text", *(f"c{n}" for n in range(len(last)))]
    assert in_dialect("".join(map(write_spark, [header, *rows]))) == (rows, 0)


def test_a_backslash_before_a_quote_is_text_in_the_usual_dialect() -> None:
    rows = [["d0", r"C:\dir" + "\\"], ["d1", r"a, \" b"], ["d2", '\\"'], ["d3", "plain"]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["id", "text"], *rows])
    assert in_dialect(text.getvalue()) == (rows, 0)
    quoted_text = io.StringIO()
    csv.writer(quoted_text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(
        [["id", "text"], *rows]
    )
    assert in_dialect(quoted_text.getvalue()) == (rows, 0)


def test_cells_after_the_text_may_be_missing() -> None:
    text = "id,text,a,b\nd0,one,1,2\nd1,two\nd2,three,3\nd3,four,4,5,\nd4,five,6,7,,\nd5\n"
    rows, num_refused = in_dialect(text)
    assert rows == [
        ["d0", "one", "1", "2"],
        ["d1", "two"],
        ["d2", "three", "3"],
        ["d3", "four", "4", "5"],
        ["d4", "five", "6", "7"],
    ]
    assert num_refused == 1, "without a text"
    assert in_dialect(text, needed=()) == ([row for row in rows if len(row) == 4], 3)


def test_a_row_that_lacks_cells_may_be_torn() -> None:
    text = "id,text,a\nd0,one,\nd1,torn by\na line,x\nd2,two,y\n"
    assert in_dialect(text) == ([["d0", "one", ""], ["d2", "two", "y"]], 2)


def test_a_row_with_too_many_cells_stays_bad() -> None:
    assert in_dialect("id,text\nd0,one,more\nd1,two,\n") == ([["d1", "two"]], 1)
