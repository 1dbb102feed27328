"""A run's options as a file: written and read again, over another's, and refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.command_line.failures import hints_of
from pipeline.methods.method import Method
from pipeline.packing.reading import Reading
from pipeline.scoring.teaching import Teaching
from pipeline.training.command import parse_config
from pipeline.training.config import TrainConfig
from pipeline.training.log import RUN_FILE, write_run_file

PLAIN = TrainConfig(
    data=Reading("a"), student="s", output=Path("o"), method=Method("full"), num_steps=60
)
CHANGES = {
    "seed": {"seed": 3, "method": Method("full", seed=3)},  # one option of both
    "text": {"data": Reading("a", where="name = '\"é😀\\\x7f\n'", student_bos="-1")},
    "generation": {"data": Reading("a", generation=3)},
    "latest": {"data": Reading("m.toml", generation="latest")},
    "only scores": {"method": Method("alm"), "teaching": Teaching(stored_losses=("",))},
    "dash": {"method": Method("alm"), "teaching": Teaching(stored_losses=("-teacher",))},
    "teachers": {
        "method": Method("distill", weight=0.5, distill_tokens="kept", reverse_kl=True),
        "teaching": Teaching(stored_losses=("1.5B", "7B"), teacher_weights=(1e-05, 3.0)),
    },
    "switches": {"bf16": True, "random_init": True, "device": "cuda:1", "heldout": ("a=b", "c")},
    "numbers": {"clip_norm": float("inf"), "learning_rate": 2e-3, "teacher_seq_length": 7},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_file_is_read_as_it_was_written(tmp_path: Path, changes: dict[str, object]) -> None:
    config = replace(PLAIN, output=tmp_path, **changes)
    write_run_file(replace(config, exit_after=5, dry_run=True))
    assert parse_config(["--config", str(tmp_path / RUN_FILE)]) == config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(
        'data = "a"\nstudent = "s"\noutput = "o"\nmethod = "full"\n'
        'bf16 = true\ncompile = false\nnum-steps = 60\nheldout = ["b", "c"]\n'
    )
    return path


def test_the_command_line_comes_after_the_file(file: Path) -> None:
    read = replace(PLAIN, bf16=True, heldout=("b", "c"))
    assert parse_config(["--config", str(file)]) == read
    given = ["--num-steps=70", "--no-bf16", f"--config={file}", "--heldout", "d", "--compile"]
    changed = replace(read, num_steps=70, bf16=False, heldout=("d",), compile=True)
    assert parse_config(given) == changed
    assert parse_config(["--config=none.toml", "--config", str(file)]) == read


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("seq_length = 5", "seq_length isn't an option of vocag train", "seq-length"),
        ("[method]", "isn't a TOML file: ", None),
        ("[steps]\nnum = 5", "steps isn't an option of vocag train", "num-steps"),
        ("config = 'b'", "config isn't an option of vocag train", "vocag train --help"),
        ("random-init = 1", "random-init is true or false, not 1", None),
        ("seed = true", "seed is True, and takes a number, a text or a list", None),
        ("warmup-steps = 60", "--warmup-steps 60 must be below --num-steps 60", None),
    ],
)
def test_what_a_file_may_not_say(file: Path, line: str, message: str, hint: str | None) -> None:
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ValueError) as refused:  # noqa: PT011 -- the message follows
        parse_config(["--config", str(file)])
    assert message in str(refused.value)
    assert hints_of(refused.value) == ([f"hint: {hint}"] if hint else [])


def test_argparse_names_the_same_option(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text().replace('"s"', '"s"\nseed = "many"').replace("output", "#"))
    for line in ("argument --seed: invalid int value: 'many'", "are required: --output"):
        with pytest.raises(SystemExit):
            parse_config(["--config", str(file)])
        assert line in capsys.readouterr().err
        file.write_text(file.read_text().replace('"many"', "5"))
