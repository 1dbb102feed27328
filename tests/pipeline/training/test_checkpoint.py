"""Checkpoints: exact resume, and what no run continues from."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.command_line.failures import hints_of
from pipeline.methods.method import Method
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading
from pipeline.training.command import main
from pipeline.training.config import TrainConfig
from pipeline.training.loop import train
from tests.support.runs import read_log, require_equal_weights, weights_of
from tests.support.training_runs import SEQ_LENGTH, pair_config


def test_six_steps_equal_three_a_restart_and_three(six: TrainConfig, tmp_path: Path) -> None:
    three = replace(six, output=tmp_path / "three")
    train(replace(three, exit_after=3))
    assert not (three.output / "model").exists()
    with (three.output / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": "of a step that the checkpoint does not know"}\n')
    train(three)
    require_equal_weights(six.output, three.output)
    logs = [[{**line, "seconds": None} for line in read_log(run.output)] for run in (six, three)]
    assert logs[0] == logs[1]
    assert [record["step"] for record in logs[0]] == [1, 2, 3, 4, 5, 6]
    assert sum("heldout_bits_per_byte" in record for record in logs[0]) == 3
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(three.output)).Reload().Scalars("loss")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]
    losses = [record["loss"] for record in logs[1]]
    assert [event.value for event in events] == pytest.approx(losses)


def test_a_run_that_began_without_fused_adamw_goes_on_without(
    six: TrainConfig, tmp_path: Path
) -> None:
    """The two round differently, so a run keeps the one that it began with."""
    old = replace(six, output=tmp_path / "old")
    train(replace(old, exit_after=3))
    path = old.output / "checkpoint.pt"
    checkpoint = torch.load(path)
    assert all(group["fused"] for group in checkpoint["optimizer"]["param_groups"])
    for group in checkpoint["optimizer"]["param_groups"]:
        group["fused"] = None
    torch.save(checkpoint, path)
    train(old)
    groups = torch.load(path)["optimizer"]["param_groups"]
    assert not any(group["fused"] for group in groups)
    for name, weight in weights_of(six.output).items():
        torch.testing.assert_close(weight, weights_of(old.output)[name], rtol=1e-3, atol=1e-5)


def test_a_checkpoint_of_other_options_is_refused(six: TrainConfig) -> None:
    told = r"made with num_steps=6, this run has 7; with learning_rate=0\.001, this run has 0\.01: "
    with pytest.raises(ValueError, match=told):
        train(replace(six, learning_rate=0.01, num_steps=7))
    with pytest.raises(ValueError, match=r"made with seed=0, this run has 1: give"):
        train(replace(six, seed=1, method=replace(six.method, seed=1)))


def test_other_options_are_refused_before_models_are_read(six: TrainConfig) -> None:
    gone = replace(six, student="gone", teaching=Teaching(teacher="gone"))
    with pytest.raises(ValueError, match=r"made with student=.*, this run has gone"):
        train(gone)


def test_another_method_is_told_as_one_difference(six: TrainConfig) -> None:
    told = r"made with method=random, this run has full: give"
    with pytest.raises(ValueError, match=told):
        train(replace(six, method=Method("full"), teaching=Teaching()))


def test_a_teacher_that_has_changed_since_the_checkpoint_is_refused(
    lab: Path, tmp_path: Path
) -> None:
    shutil.copytree(lab / "teacher_run/model", tmp_path / "teacher")
    taught = {"teacher": str(tmp_path / "teacher"), "exit_after": 1}
    config = pair_config(lab, tmp_path / "run", Method("teacher"), **taught)
    train(config)
    train(replace(config, exit_after=2))
    path = tmp_path / "teacher" / "model.safetensors"
    weights = {name: own * 1.01 for name, own in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match="was made with another teacher of that name"):
        train(replace(config, exit_after=3))


@pytest.mark.parametrize(
    "held", [b"", b"PK\x03\x04 cut", b"no archive", {"model": {}}, [1]], ids=str
)
def test_a_damaged_or_foreign_checkpoint_is_named(
    six: TrainConfig, tmp_path: Path, held: object
) -> None:
    path = tmp_path / "checkpoint.pt"
    if isinstance(held, bytes):
        path.write_bytes(held)
    else:
        torch.save(held, path)
    with pytest.raises(ValueError, match=r"checkpoint\.pt can't be read .* or damaged") as error:
        train(replace(six, output=tmp_path))
    assert hints_of(error.value) == [f"hint: output={tmp_path}-2"]


def test_a_checkpoint_too_large_for_the_memory_is_not_called_damaged(
    six: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 B")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(ValueError, match=r"memory ran out while .* was read .* allocate 8 B"):
        train(six)


def test_a_student_of_another_shape_than_the_checkpoints_is_refused(
    six: TrainConfig, tmp_path: Path
) -> None:
    for name in ("checkpoint.pt", "log.jsonl"):
        shutil.copy(six.output / name, tmp_path)
    wider = AutoConfig.from_pretrained(six.student, hidden_size=64)
    AutoModelForCausalLM.from_config(wider).save_pretrained(tmp_path / "wider")
    shutil.copy(Path(six.student, "tokenizer.json"), tmp_path / "wider")
    (tmp_path / "same").symlink_to(tmp_path / "wider")
    changed = replace(six, output=tmp_path, student=str(tmp_path / "same"))
    checkpoint = torch.load(tmp_path / "checkpoint.pt")
    checkpoint["run"]["student"] = changed.student
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="is of a student with other weights than"):
        train(changed)


def test_a_log_whose_last_line_is_cut_goes_on(six: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(six.output, run)
    whole = (run / "log.jsonl").read_text("utf-8")
    (run / "log.jsonl").write_text(whole + '{"step": 7, "lo', "utf-8")
    train(replace(six, output=run))
    assert (run / "log.jsonl").read_text("utf-8") == whole
    (run / "log.jsonl").write_text('{"step\n' + whole, "utf-8")
    with pytest.raises(ValueError, match=r"log\.jsonl, line 1, can't be read"):
        train(replace(six, output=run))


def test_a_run_goes_on_with_its_rows_when_documents_leave(
    lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command finds its generation, says so, and moves on where it is told to."""
    remove = pytest.importorskip("beam_jobs.remove.command").main
    data = tmp_path / "pair"
    shutil.copytree(lab / "pair", data)
    method = Method("full")
    start = pair_config(lab, tmp_path / "three", method, data=Reading(str(data)), teacher=None)
    train(replace(start, output=tmp_path / "six"))
    train(replace(start, exit_after=3))
    shutil.copytree(tmp_path / "three", tmp_path / "moved")
    (tmp_path / "ids.txt").write_text("".join(f"doc-0-{n}\n" for n in range(0, 40, 2)))
    assert remove([str(data), "--ids", str(tmp_path / "ids.txt")]) == 0
    command = ["--data", str(data), "--student", start.student, "--method", "full"]
    command += ["--num-steps", "6", "--warmup-steps", "2", "--seq-length", str(SEQ_LENGTH)]
    command += ["--global-batch-size", "4", "--micro-batch-size", "2", "--num-epochs", "4"]
    command += ["--learning-rate", "1e-3", "--output"]
    assert main([*command, str(tmp_path / "three")]) == 0
    require_equal_weights(tmp_path / "six", tmp_path / "three")
    moved = [*command, str(tmp_path / "moved"), "--generation"]
    assert main([*moved, "1"]) == 2
    assert "generation 0 of" in capsys.readouterr().err
    assert main([*moved, "latest"]) == 0
    six = weights_of(tmp_path / "six")
    assert not all(torch.equal(six[k], v) for k, v in weights_of(tmp_path / "moved").items())


def test_a_mixture_trains_resumes_and_logs_by_source(lab: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(
        f'[datasets.pair]\npath = "{lab}/pair"\nrepeat = true\n'
        f'[datasets.more]\npath = "{lab}/heldout"\nmax_epochs = 2\n'
        "[[stages]]\nweights = { pair = 0.75, more = 0.25 }\n"
        "[[stages]]\nfrom_tokens = 700\nweights = { pair = 0.5, more = 0.5 }\n"
    )
    changes = {"data": Reading(str(mixture)), "num_epochs": 1}
    train(pair_config(lab, tmp_path / "six", Method("teacher"), **changes))
    train(pair_config(lab, tmp_path / "three", Method("teacher"), **changes, exit_after=3))
    train(pair_config(lab, tmp_path / "three", Method("teacher"), **changes))
    require_equal_weights(tmp_path / "six", tmp_path / "three")
    rows = AlignedRows(pair_config(lab, tmp_path, Method("full"), **changes).stream)
    read, num_held = {"pair": 0, "more": 0}, 0
    for step, record in enumerate(read_log(tmp_path / "three")):
        if 4 * step + 4 <= rows.plan.stretches[0].stop:
            tokens = [record[f"tokens/{name}"] for name in read]
            assert abs(tokens[0] - 0.75 * sum(tokens)) <= SEQ_LENGTH, "the weight to one row"
            num_held += 1
        for position in range(4 * step, 4 * step + 4):
            read[rows.layout.sources[rows.locate(position)[0]]] += 1
        assert record["epochs/pair"] == read["pair"] / len(rows.datasets[0].plan)
        assert record["epochs/more"] == read["more"] / len(rows.datasets[1].plan)
        assert 0 < record["tokens/pair"] <= SEQ_LENGTH * read["pair"]
        batch = rows.__getitems__(range(4 * step, 4 * step + 4))
        labels = batch["loss_mask"].sum(-1)
        counts = [float(labels[batch["source"] == number].sum()) for number in (0, 1)]
        losses = [record[f"student_loss/{name}"] or 0 for name in read]
        total = sum(count * loss for count, loss in zip(counts, losses, strict=True))
        assert total / sum(counts) == pytest.approx(record["student_loss"], rel=1e-5)
    assert read["more"] > 2
    assert num_held > 1
