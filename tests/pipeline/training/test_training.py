"""The loop: exact accumulation, mixtures, schedules, and the command."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.streaming import AlignedRows, Reading
from pipeline.training.command import main, parse_config, what_next
from pipeline.training.config import TrainConfig
from pipeline.training.loop import learning_rate, train
from tests.support.runs import read_log, require_equal_weights, weights_of
from tests.support.training_runs import pair_config


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("exit_after", 0, "exit_after=0: it must be at least 1"),
        ("min_lr_fraction", 10.0, r"min_lr_fraction=10\.0 is above 1: 10 % is 0\.1"),
        ("exit_after", -1, "exit_after=-1: it must be at least 1"),
        ("workers", -1, "workers=-1: it must be at least 0"),
        ("export_every", -2, "export_every=-2: it must be at least 0"),
        ("clip_norm", 0.0, "clip_norm=0.0 would clip every gradient to nothing"),
    ],
)
def test_numbers_that_undo_a_run_are_refused(
    six: TrainConfig, name: str, value: float, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        replace(six, **{name: value})


def test_a_run_is_a_file(six: TrainConfig, tmp_path: Path) -> None:
    """Another starts it from that alone, in a folder of her own, and gets its weights and log."""
    sent = shutil.copy(six.output / "run.toml", tmp_path)
    assert main(["--config", str(sent), "--output", str(tmp_path / "again")]) == 0
    require_equal_weights(six.output, tmp_path / "again")
    own, theirs = read_log(six.output), read_log(tmp_path / "again")
    assert [line | {"seconds": 0} for line in theirs] == [line | {"seconds": 0} for line in own]
    assert main(["--config", str(sent), "--output", str(tmp_path / "other"), "--seed", "1"]) == 0
    assert read_log(tmp_path / "other")[0]["loss"] != read_log(six.output)[0]["loss"]


def test_epochs_of_a_mixture_are_its_files(lab: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(
        f'[datasets.pair]\npath = "{lab}/pair"\n[[stages]]\nweights = {{ pair = 1.0 }}\n'
    )
    changes = {"data": Reading(str(mixture)), "num_epochs": 1}
    config = pair_config(lab, tmp_path / "run", Method("full"), **changes)
    with pytest.raises(ValueError, match=r"num_epochs=4: a mixture's file says how often"):
        train(replace(config, num_epochs=4))
    with pytest.raises(
        ValueError, match=r"900 steps need 3600 rows, .*toml has \d+ in all its epochs: raise max_e"
    ):
        train(replace(config, num_steps=900))
    with pytest.raises(ValueError, match=r"heldout=mixture.toml=.* is a mixture: name its datas"):
        train(replace(config, heldout=(str(mixture),)))


def test_accumulation_changes_nothing_but_rounding(lab: Path, tmp_path: Path) -> None:
    method = Method("teacher", scope="row", keep_fraction=0.3)
    for size in (1, 4):
        train(pair_config(lab, tmp_path / f"{size}", method, micro_batch_size=size, num_steps=3))
    one, four = weights_of(tmp_path / "1"), weights_of(tmp_path / "4")
    start = load_file(lab / "student" / "model.safetensors")
    for key in one:
        torch.testing.assert_close(one[key], four[key], rtol=1e-3, atol=1e-5)
    assert any((one[key] - start[key]).abs().max() > 1e-3 for key in one)


def test_schedules_end_where_they_say(tmp_path: Path) -> None:
    common = {"data": Reading(""), "student": "", "output": tmp_path, "method": Method("full")}
    steps = {"num_steps": 101, "warmup_steps": 1, "learning_rate": 1e-3, "min_lr_fraction": 0.2}
    rates = {}
    for schedule in ("constant", "linear", "cosine"):
        config = TrainConfig(**common, **steps, schedule=schedule)
        rates[schedule] = [learning_rate(config, step) for step in (0, 1, 26, 51, 101)]
    assert rates["constant"] == pytest.approx([1e-3] * 5)
    assert rates["linear"] == pytest.approx([1e-3, 1e-3, 8e-4, 6e-4, 2e-4])
    half = 0.5 * 0.5**0.5
    assert rates["cosine"] == pytest.approx([1e-3, 1e-3, (0.6 + 0.8 * half) * 1e-3, 6e-4, 2e-4])
    with pytest.raises(ValueError, match="schedule=square: choose one of cosine, linear, constant"):
        TrainConfig(**common, schedule="square")


def test_rows_have_the_teachers_length_that_is_asked_for(lab: Path, tmp_path: Path) -> None:
    """Scores made with a length of their own could not be trained with."""
    config = pair_config(lab, tmp_path, Method("teacher"), teacher_seq_length=96)
    assert AlignedRows(config.stream)[0]["teacher_input_ids"].shape == (96,)
    message = r"a row holds 600 teacher tokens, .* for 512: lower teacher_seq_length"
    with pytest.raises(ValueError, match=message):
        train(replace(config, teacher_seq_length=600))


@pytest.mark.parametrize(
    ("side", "place"), [("student", r"step 1 \(rows 0 to 3 of .*"), ("teacher", "")]
)
def test_a_broken_model_stops_the_run_and_names_the_rows(
    lab: Path, tmp_path: Path, side: str, place: str
) -> None:
    sources = {"student": lab / "student", "teacher": lab / "teacher_run" / "model"}
    model = load_language_model(str(sources[side]))
    model.base_model.norm.weight.data.fill_(3e38)  # NaN itself is refused at load
    model.save_pretrained(tmp_path / side)
    config = pair_config(lab, tmp_path / "run", Method("teacher"), **{side: str(tmp_path / side)})
    with pytest.raises(
        NonFiniteLossError, match=rf"{place}{side}_losses\[0, \d+\] is nan; .* in rows \[0"
    ):
        train(config)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_command_line_has_an_option_for_every_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--data", "d", "--student", "s", "--output", str(tmp_path)]
    config = parse_config([*needed, "--method", "chunks", "--teacher", "t", "--num-chunks", "8",
                           "--seed", "3", "--bf16", "--exit-after", "5"])  # fmt: skip
    assert config.method == Method("chunks", num_chunks=8, seed=3)
    assert (config.seed, config.bf16, config.exit_after) == (3, True, 5)
    losses = parse_config([*needed, "--method", "alm", "--stored-losses", ""])
    assert losses.teaching.names == ("",), "the only ones"
    assert main([*needed, "--method", "full", "--device", "gpu"]) == 2
    assert re.search(r": --device gpu: .*\nhint: --device cpu\n", capsys.readouterr().err)


def test_a_run_ends_with_what_to_do_next() -> None:
    config = parse_config(["--data=d", "--student=s", "--method=full", "--output=a run"])
    assert "vocag evaluate 'a run/model'" in what_next(config)
    assert "a run/model" not in what_next(replace(config, exit_after=5))


def test_a_run_that_is_over_is_not_said_to_have_stopped(six: TrainConfig) -> None:
    told = what_next(replace(six, exit_after=1))
    assert str(six.output / "model") in told
    assert "stopped" not in told
