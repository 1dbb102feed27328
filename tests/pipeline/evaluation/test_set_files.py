"""Sets' files as users have them."""

from pathlib import Path

import pytest

from pipeline.command_line.failures import hints_of
from pipeline.evaluation.set_files import read_items

LINE = '{"question": "One and one?", "answer": "It is two. #### 2"}'


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(LINE, "utf-8-sig")
    assert read_items("gsm8k", str(tmp_path))[0].question == "One and one?"


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_bytes(f"{LINE}\n".encode() + b'{"question": "\xff"}')
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl: line 2 isn't UTF-8 .*0xff"):
        read_items("gsm8k", str(tmp_path))


def test_a_file_is_no_folder_of_sets(tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    file.write_text(LINE)
    with pytest.raises(ValueError, match="is a file: give the folder") as caught:
        read_items("gsm8k", str(file))
    assert hints_of(caught.value) == [f"hint: data={tmp_path}"]
