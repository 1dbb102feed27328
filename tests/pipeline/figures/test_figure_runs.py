"""Runs of `vocag train`, compared."""

import json
from pathlib import Path

import pytest

from pipeline.figures.command import main
from pipeline.figures.runs import compare_runs


def _write_log(folder: Path, values: list[float]) -> Path:
    folder.mkdir(parents=True)
    records = [
        {"step": 10 * n, "loss": 1.0, "heldout_bits_per_byte": value}
        for n, value in enumerate(values, start=1)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in [{"step": 1}, *records])
    (folder / "log.jsonl").write_text(lines)
    return folder


def test_runs_are_compared_at_equal_steps(tmp_path: Path) -> None:
    full = _write_log(tmp_path / "full", [3.0, 2.0])
    teacher = _write_log(tmp_path / "teacher", [3.0, 2.5])
    table = compare_runs([full, teacher], tmp_path / "runs.svg")
    assert [line.split() for line in table] == [
        ["step", "10", "20"],
        ["full", "3.000", "2.000"],
        ["teacher", "3.000", "2.500"],
    ]
    assert ">full<" in (tmp_path / "runs.svg").read_text()
    short = _write_log(tmp_path / "short", [3.0])
    with pytest.raises(ValueError, match=r"measured at steps \[10, 20\], .*short at \[10\]"):
        compare_runs([full, short], tmp_path / "runs.svg")


def test_runs_of_one_name_are_seeds(tmp_path: Path) -> None:
    seeds = {"seed-0/full": [3.0, 2.0], "seed-1/full": [3.2, 2.5], "seed-0/random": [4.0, 3.0]}
    folders = [_write_log(tmp_path / name, values) for name, values in seeds.items()]
    assert [line.split() for line in compare_runs(folders)[1:]] == [
        ["full,", "1", "3.000", "2.000"],
        ["full,", "2", "3.200", "2.500"],
        ["full,", "mean", "3.100", "2.250"],
        ["random", "4.000", "3.000"],
    ]


def test_one_of_several_held_out_sets_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "teacher"
    run.mkdir()
    record = {"step": 5, "heldout_bits_per_byte/math": 2.5, "heldout_bits_per_byte/code": 1.5}
    (run / "log.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["runs", str(run), "--heldout", "code"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["teacher", "1.500"]
    assert main(["runs", str(run)]) == 2
    assert "it measured code, math: see --heldout" in capsys.readouterr().err
