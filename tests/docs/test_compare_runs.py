"""Runs of `vocag train`, compared."""

import json
from pathlib import Path

import pytest
from compare_runs import main, read_run


def write_log(folder: Path, values: list[float], heldout: str = "") -> str:
    folder.mkdir(parents=True)
    name = f"heldout_bits_per_byte{heldout}"
    records = [{"step": 1}, *({"step": 10 * n, name: v} for n, v in enumerate(values, start=1))]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def test_runs_are_compared_at_equal_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = {"seed-0/full": [3.0, 2.0], "seed-1/full": [3.2, 2.5], "seed-0/random": [4.0, 3.0]}
    runs = [write_log(tmp_path / name, values) for name, values in seeds.items()]
    main([*runs, "--output", str(tmp_path / "runs.svg")])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step", "10", "20"],
        ["full", "3.100", "2.250"],
        ["random", "4.000", "3.000"],
    ]
    assert ">full<" in (tmp_path / "runs.svg").read_text()
    for wrong, said in (
        (write_log(tmp_path / "short", [3.0]), "measured at steps [10, 20]"),
        (write_log(tmp_path / "unmeasured", []), "unmeasured has no heldout_bits_per_byte, but no"),
        (str(tmp_path / "nowhere"), "nowhere has no log.jsonl, so"),
    ):
        with pytest.raises(SystemExit):
            main([*runs, wrong])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*runs, "--output", str(tmp_path / "runs.txt")])
    shown = capsys.readouterr()
    assert ("name a file that ends in" in shown.err, shown.out) == (True, "")


def test_one_of_several_held_out_sets_is_compared(tmp_path: Path) -> None:
    run = Path(write_log(tmp_path / "teacher", [1.5], "/code"))
    assert read_run(run, "code") == {10: 1.5}
    with pytest.raises(ValueError, match=r"has no heldout_bits_per_byte, but heldout_.*/code"):
        read_run(run)


def test_runs_that_go_on_or_diverged_are_compared_as_far_as_they_are(tmp_path: Path) -> None:
    """A line that was just being written, or a value that wasn't finite, ended in a traceback."""
    run = Path(write_log(tmp_path / "teacher", [1.5, 1.25]))
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 30, "heldout_bits_per_byte": null}\n{"step": 31, "lo')
    assert read_run(run) == {10: 1.5, 20: 1.25}
