"""Held-out text is not in the training text."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from hold_out import hold_out


def test_held_out_documents_are_in_one_part_only(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"\u2028 {n}"}, ensure_ascii=False) + "\n" for n in range(25)]
    (tmp_path / "all.jsonl").write_text("".join(lines), "utf-8")
    assert hold_out(tmp_path / "all.jsonl", tmp_path, every=10) == {"heldout": 2, "train": 23}
    parts = [(tmp_path / f"{name}.jsonl").read_text("utf-8") for name in ("train", "heldout")]
    assert sorted("".join(parts).split("\n")) == sorted("".join(lines).split("\n"))
    assert parts[1] == lines[9] + lines[19]
    with pytest.raises(ValueError, match=r"--every 26 must lie in 2\.\.25"):
        hold_out(tmp_path / "all.jsonl", tmp_path, every=26)
