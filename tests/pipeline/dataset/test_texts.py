"""Texts of files and datasets, for commands that align nothing."""

import json
from pathlib import Path

import pytest

from pipeline.dataset.texts import read_texts
from tests.support.datasets import build_dataset


def _write(path: Path, *lines: str) -> str:
    path.write_bytes("\n".join(lines).encode())
    return str(path)


def test_texts_of_files_and_datasets(tmp_path: Path) -> None:
    first, second = "one\u2028line", "zwei 🤗"
    lines = _write(tmp_path / "a.jsonl", *(json.dumps({"t": each}) for each in (first, second)), "")
    plain = _write(tmp_path / "b.txt", "three", "lines", "")
    found = [each.text.decode() for each in read_texts([lines, plain], text_field="t")]
    assert found == [first, second, "three\nlines\n"]
    build_dataset(tmp_path / "aligned", keep_text=True)
    texts = list(read_texts([str(tmp_path / "aligned")]))
    assert len({each.document_id for each in texts}) == len(texts) > 1
    assert all(each.text for each in texts)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"other": "b"}'], 'line 2 has no text "text": see --text-field'),
        (['{"text": "a"}', "", '{"text": "b"}'], "line 2 is blank: take it out"),
        (["[1]"], "line 1 has no text"),
        (['{"text": "a"}', '{"text": "a'], r"line 2 isn't JSON \(Unterminated string.*: write"),
        (['{"text": "a"}', "[" * 100_000], r"line 2 isn't JSON \(maximum recursion depth"),
        (['{"text": "a\\ud83d"}'], r'line 1: character 1 of "text" is half .* \(\\ud83d\): write'),
    ],
)
def test_lines_without_a_text_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_texts([_write(tmp_path / "a.jsonl", *lines)]))
    assert len(list(read_texts([_write(tmp_path / "b.jsonl", '{"text": "a"}', "", "")]))) == 1


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_bytes_that_are_not_utf_8_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b'{"text": "a"}\n{"text": "b\xff"}\n')
    with pytest.raises(ValueError, match=rf"{name}: byte 25 \(0xff\) isn't UTF-8: convert"):
        list(read_texts([str(path)]))


def test_a_byte_order_mark_and_windows_line_ends_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n\r\n')
    plain = tmp_path / "b.txt"
    plain.write_bytes(b"\xef\xbb\xbfc\r\n")
    found = [each.text for each in read_texts([str(path), str(plain)])]
    assert found == [b"a", b"b", b"c\r\n"]
