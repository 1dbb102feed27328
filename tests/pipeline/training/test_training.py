"""The trainer: exact resume, exact accumulation, and each method against a slow count."""

import json
import math
import re
import shlex
import shutil
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pipeline.command_line.failures import hints_of
from pipeline.dataset.files import open_dataset
from pipeline.figures.command import main as figures
from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.losses.loss_result import LossResult
from pipeline.methods import METHODS
from pipeline.methods.hf_pass import compute_teacher_losses, mean_teacher_loss, student_states
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import UnknownLogitsError
from pipeline.models.probe import UntrainedTeacherError
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, Rows, StreamConfig
from pipeline.streaming.vocabularies import vocabulary_map
from pipeline.tokenization import load_tokenizer
from pipeline.training import held_out
from pipeline.training.command import main, parse_config, what_next
from pipeline.training.config import TrainConfig
from pipeline.training.guided import GuidedStudent
from pipeline.training.held_out import evaluate, open_heldout
from pipeline.training.loop import learning_rate, train
from pipeline.training.ranks import Ranks
from schemas.document import AlignedDocument
from schemas.errors import ForeignTokenizerError
from schemas.manifest import MANIFEST_FILE, ConventionRecord, encode_manifest
from tests.support.datasets import (
    build_dataset,
    byte_level,
    make_texts,
    read_documents,
    remove_documents,
    with_control_tokens,
)
from tests.support.hf_folders import make_instruct, write_model
from tests.support.runs import read_log, require_equal_weights, weights_of
from tests.support.teaching import with_teaching

SEQ_LENGTH = 64


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two vocabularies, one of one vocabulary, a student and a trained teacher."""
    root = tmp_path_factory.mktemp("world")
    student, teacher = byte_level(400), byte_level(480)
    build_dataset(root / "pair", make_texts(40))
    build_dataset(root / "heldout", make_texts(6, seed=1))
    build_dataset(root / "same", make_texts(40), student=teacher, teacher=teacher)
    write_model(root / "student", student)
    write_model(root / "teacher_start", teacher, seed=1)
    changes = {"data": Reading(str(root / "same")), "student": str(root / "teacher_start")}
    lengths = {"num_steps": 30, "num_epochs": 20, "learning_rate": 1e-2}
    train(_config(root, root / "teacher_run", Method("full"), teacher=None, **changes, **lengths))
    return root


@pytest.fixture(scope="module")
def student(world: Path) -> PreTrainedModel:
    return load_language_model(str(world / "student"))


@pytest.fixture(scope="module")
def teacher(world: Path) -> PreTrainedModel:
    return load_language_model(str(world / "teacher_run" / "model"))


@pytest.fixture(scope="module")
def six(world: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run of six steps, with everything that a run can write."""
    config = _config(
        world,
        tmp_path_factory.mktemp("runs") / "six",
        Method("random"),
        heldout=(str(world / "heldout"),),
        evaluate_every=2,
        export_every=2,
        tracker="tensorboard" if find_spec("tensorboard") else None,
    )
    train(config)
    return config


def _config(world: Path, output: Path, method: Method, **changes: Any) -> TrainConfig:
    changes = with_teaching({"teacher": str(world / "teacher_run/model"), **changes})
    config = TrainConfig(
        data=Reading(str(world / "pair")),
        student=str(world / "student"),
        output=output,
        teaching=changes.pop("teaching"),
        method=method,
        num_steps=6,
        warmup_steps=2,
        seq_length=SEQ_LENGTH,
        global_batch_size=4,
        micro_batch_size=2,
        num_epochs=4,
        learning_rate=1e-3,
    )
    return replace(config, **changes)


def _rows(data: Path, seq_length: int = SEQ_LENGTH) -> AlignedRows:
    return AlignedRows(StreamConfig(Reading(str(data)), seq_length=seq_length))


def _loss(
    method: Method,
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batch: Rows,
    step: int = 0,
    **more: Any,
) -> LossResult:
    return GuidedStudent(student, method, **more)(batch, teacher=teacher, step=step)


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
    world: Path, tmp_path: Path
) -> None:
    shutil.copytree(world / "teacher_run/model", tmp_path / "teacher")
    taught = {"teacher": str(tmp_path / "teacher"), "exit_after": 1}
    config = _config(world, tmp_path / "run", Method("teacher"), **taught)
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


@pytest.mark.parametrize("name", ["model", "step-000003"])
def test_a_run_does_not_overwrite_the_student_that_it_begins_with(
    six: TrainConfig, tmp_path: Path, name: str
) -> None:
    (tmp_path / "run").mkdir()
    shutil.copytree(six.student, tmp_path / "run" / name)
    given = {"output": tmp_path / "run", "student": str(tmp_path / "run" / name)}
    with pytest.raises(ValueError, match="which the run would overwrite: name another") as error:
        replace(six, **given)
    assert hints_of(error.value) == [f"hint: output={tmp_path}/run-2"]
    replace(six, **given | {"output": tmp_path / "other"})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("exit_after", 0, "exit_after=0 is below 1"),
        ("min_lr_fraction", 10.0, r"min_lr_fraction=10\.0 is above 1: 10 % is 0\.1"),
        ("exit_after", -1, "exit_after=-1 is below 1"),
        ("workers", -1, "workers=-1 is below 0"),
        ("export_every", -2, "export_every=-2 is below 0"),
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


def test_a_run_goes_on_with_its_rows_when_documents_leave(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command finds its generation by itself, says so, and moves on where it is told to."""
    remove = pytest.importorskip("beam_jobs.remove.command").main
    data = tmp_path / "pair"
    shutil.copytree(world / "pair", data)
    method = Method("full")
    start = _config(world, tmp_path / "three", method, data=Reading(str(data)), teacher=None)
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


def test_a_mixture_trains_resumes_and_logs_by_source(world: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(
        f'[datasets.pair]\npath = "{world}/pair"\nrepeat = true\n'
        f'[datasets.more]\npath = "{world}/heldout"\nmax_epochs = 2\n'
        "[[stages]]\nweights = { pair = 0.75, more = 0.25 }\n"
        "[[stages]]\nfrom_tokens = 700\nweights = { pair = 0.5, more = 0.5 }\n"
    )
    changes = {"data": Reading(str(mixture)), "num_epochs": 1}
    train(_config(world, tmp_path / "six", Method("teacher"), **changes))
    train(_config(world, tmp_path / "three", Method("teacher"), **changes, exit_after=3))
    train(_config(world, tmp_path / "three", Method("teacher"), **changes))
    require_equal_weights(tmp_path / "six", tmp_path / "three")
    rows = AlignedRows(_config(world, tmp_path, Method("full"), **changes).stream)
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


def test_epochs_of_a_mixture_are_its_files(world: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(
        f'[datasets.pair]\npath = "{world}/pair"\n[[stages]]\nweights = {{ pair = 1.0 }}\n'
    )
    changes = {"data": Reading(str(mixture)), "num_epochs": 1}
    config = _config(world, tmp_path / "run", Method("full"), **changes)
    with pytest.raises(ValueError, match=r"num_epochs=4: a mixture's file says how often"):
        train(replace(config, num_epochs=4))
    with pytest.raises(
        ValueError, match=r"900 steps need 3600 rows, .*toml has \d+ in all its epochs: raise max_e"
    ):
        train(replace(config, num_steps=900))
    with pytest.raises(ValueError, match=r"heldout=mixture.toml=.* is a mixture: name its datas"):
        train(replace(config, heldout=(str(mixture),)))


def test_accumulation_changes_nothing_but_rounding(world: Path, tmp_path: Path) -> None:
    method = Method("teacher", scope="row", keep_fraction=0.3)
    for size in (1, 4):
        train(_config(world, tmp_path / f"{size}", method, micro_batch_size=size, num_steps=3))
    one, four = weights_of(tmp_path / "1"), weights_of(tmp_path / "4")
    start = load_file(world / "student" / "model.safetensors")
    for key in one:
        torch.testing.assert_close(one[key], four[key], rtol=1e-3, atol=1e-5)
    assert any((one[key] - start[key]).abs().max() > 1e-3 for key in one)


@pytest.mark.parametrize("keep_fraction", [None, 0.4])
def test_alm_adds_divergences_to_kept_tokens(
    world: Path, student: PreTrainedModel, teacher: PreTrainedModel, keep_fraction: float | None
) -> None:
    batch = _rows(world / "pair").__getitems__([0, 1])
    result = _loss(Method("alm", keep_fraction=keep_fraction, weight=2.0), student, teacher, batch)
    chosen = Method("teacher", keep_fraction=keep_fraction or 0.0)
    selected = _loss(chosen, student, teacher, batch)
    divergence, count = result.metrics["divergence"].tolist()
    assert divergence > 1
    assert count == float(result.num_tokens) == float(batch["loss_mask"].sum())
    expected = float(selected.loss_sum.detach()) + 2.0 * divergence
    assert float(result.loss_sum.detach()) == pytest.approx(expected, rel=1e-5)
    kept = result.metrics["kept_fraction"].tolist()
    assert kept == selected.metrics["kept_fraction"].tolist()
    assert (kept[0] > 0.3 * kept[1]) == (keep_fraction is not None)


def test_guided_loss_equals_a_slow_count_over_documents(
    world: Path, student: PreTrainedModel, teacher: PreTrainedModel
) -> None:
    """Score each document alone with the models' own logits, choose by sorting."""
    rows = _rows(world / "pair", 512)
    batch = rows.__getitems__(list(range(len(rows))))
    documents = list(read_documents(world / "pair").values())
    assert len(documents) == 40
    found: list[tuple[float, list[float]]] = []
    for document in documents:
        of_student = _losses(student, document, "student", rows)
        of_teacher = _losses(teacher, document, "teacher", rows)
        for token, (start, end) in enumerate(document.teacher_spans.tolist()):
            if start < end:
                found.append((of_student[token], of_teacher[start:end]))
    aggregations: dict[Any, Any] = {"mean": lambda x: sum(x) / len(x), "max": max, "sum": sum}
    for how, phi in aggregations.items():
        method = Method("teacher", unmapped="exclude", aggregation=how)
        result = _loss(method, student, teacher, batch)
        ranked = sorted(((own - phi(others), own) for own, others in found), reverse=True)
        kept = [loss for _, loss in ranked[: int(0.4 * len(ranked))]]
        assert int(result.num_tokens) == len(kept)
        assert result.loss_sum.item() == pytest.approx(sum(kept), rel=1e-4)


def test_bits_per_byte_equal_a_slow_count(
    world: Path, tmp_path: Path, student: PreTrainedModel
) -> None:
    """Of the text alone: neither what comes before a document nor its end is charged."""
    heldout = str(world / "heldout")
    config = _config(world, tmp_path, Method("full"), seq_length=512, heldout=(heldout,))
    rows = AlignedRows(StreamConfig(Reading(heldout, student_eos="none"), seq_length=512))
    documents = list(read_documents(world / "heldout").values())
    nats = sum(sum(_losses(student, document, "student", rows)) for document in documents)
    num_bytes = sum(document.num_text_bytes for document in documents)
    # Whole documents in a row, as the slow count has them.
    training = AlignedRows(config.stream)
    assert training.rules.student.end_token_id is not None
    sets = open_heldout(config.heldout_sets, training)
    measured = evaluate(config, student, sets, Ranks(torch.device("cpu")))
    assert measured["heldout_bits_per_byte"] == pytest.approx(
        nats / math.log(2) / num_bytes, rel=1e-4
    )


def test_long_held_out_rows_take_no_more_memory_than_training(
    world: Path, tmp_path: Path, student: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was eight at once: of 32,768 tokens they take twice what `--dry-run` had counted."""
    sizes: list[int] = []

    def counted(model: PreTrainedModel, batch: Rows) -> torch.Tensor:
        sizes.append(len(batch["input_ids"]))
        return student_states(model, batch)

    monkeypatch.setattr(held_out, "student_states", counted)
    sets = (str(world / "heldout"),)
    rules: dict[str, Any] = {"one_document_a_row": True, "global_batch_size": 4, "heldout": sets}
    found = {}
    for length, micro_batch_size in ((64, 1), (8192, 1), (8192, 4)):
        lengths = {"seq_length": length, "micro_batch_size": micro_batch_size}
        config = _config(world, tmp_path, Method("full"), **lengths, **rules)
        heldout = open_heldout(config.heldout_sets, AlignedRows(config.stream))
        sizes.clear()
        (bits,) = evaluate(config, student, heldout, Ranks(torch.device("cpu"))).values()
        found[length, micro_batch_size] = max(sizes), bits
    assert [rows for rows, _ in found.values()] == [8, 2, 4]
    assert found[8192, 1][1] == pytest.approx(found[8192, 4][1], rel=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_loss_to_learn_from(
    world: Path, student: PreTrainedModel, teacher: PreTrainedModel, name: str
) -> None:
    kind = METHODS[name]
    data, start = ("same", "teacher_start") if kind.one_vocabulary else ("pair", "student")
    learner = load_language_model(str(world / start))
    rows = _rows(world / data)
    more = {"vocabulary_map": vocabulary_map(rows)} if kind.needs == "distributions" else {}
    batch = rows.__getitems__([0, 1])
    method = Method(name, num_chunks=4) if name.startswith("chunks") else Method(name)
    result = _loss(method, learner, teacher, batch, **more)
    result.loss_sum.backward()  # type: ignore[no-untyped-call]
    assert 0 < float(result.loss_sum.detach()) / float(result.num_tokens) < 12
    assert any(float(p.grad.abs().sum()) for p in learner.parameters() if p.grad is not None)
    kept = result.metrics.get("kept_fraction", torch.ones(2))
    whole = dict.fromkeys(("full", "distill", "kld", "uld"), (1, 1))
    low, high = (whole | {"alm": (0, 0.2)}).get(name, (0.2, 0.7))
    assert low <= float(kept[0] / kept[1]) <= high
    by_teacher = (kind.needs == "losses" and name != "alm") or kind.name.startswith("rho1")
    assert ("teacher_loss" in result.metrics) == by_teacher
    assert ("divergence" in result.metrics) == (name in ("alm", "distill", "kld", "uld"))


@pytest.mark.parametrize("name", ["kld", "uld"])
def test_a_student_that_is_its_teacher_has_no_divergence(
    world: Path, teacher: PreTrainedModel, name: str
) -> None:
    result = _loss(Method(name), teacher, teacher, _rows(world / "same", 256).__getitems__([0, 1]))
    assert float(result.metrics["divergence"][0]) == pytest.approx(0, abs=1e-2)
    assert float(result.metrics["student_loss"][0]) > 10


def test_kld_disregards_rows_that_are_no_tokens(world: Path, tmp_path: Path) -> None:
    """A teacher with more padding than the student, as Llemma's 32,016 rows for 32,000 tokens."""
    teacher = load_language_model(str(world / "teacher_run" / "model"))
    changes = {"data": Reading(str(world / "same")), "student": str(world / "teacher_start")}
    plain = _config(world, tmp_path / "plain", Method("kld"), num_steps=3, **changes)
    teacher.resize_token_embeddings(480 + 16, mean_resizing=False)
    teacher.get_output_embeddings().weight.data[480:] = 0.0  # as likely as many a token
    teacher.save_pretrained(tmp_path / "teacher")
    teaching = Teaching(teacher=str(tmp_path / "teacher"))
    padded = replace(plain, output=tmp_path / "padded", teaching=teaching)
    assert train(padded)["divergence"] == pytest.approx(train(plain)["divergence"], rel=1e-5)


def test_random_choices_differ_between_steps(world: Path, student: PreTrainedModel) -> None:
    batch = _rows(world / "pair", 256).__getitems__([0])
    losses = {
        _loss(Method("random"), student, None, batch, step).loss_sum.item() for step in (0, 0, 1, 2)
    }
    assert len(losses) == 3


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


def test_rows_have_the_teachers_length_that_is_asked_for(world: Path, tmp_path: Path) -> None:
    """Scores made with a length of their own could not be trained with."""
    config = _config(world, tmp_path, Method("teacher"), teacher_seq_length=96)
    assert AlignedRows(config.stream)[0]["teacher_input_ids"].shape == (96,)
    message = r"a row holds 600 teacher tokens, .* for 512: lower teacher_seq_length"
    with pytest.raises(ValueError, match=message):
        train(replace(config, teacher_seq_length=600))


def test_held_out_sets_are_measured_by_name(
    world: Path, tmp_path: Path, student: PreTrainedModel
) -> None:
    """Whatever was recorded when a set was aligned: the student knows no other tokens."""
    manifest = build_dataset(tmp_path / "other", make_texts(6, seed=1))
    other = replace(manifest.student, convention=ConventionRecord(5, 5, None))
    changed = encode_manifest(replace(manifest, student=other))
    (tmp_path / "other" / MANIFEST_FILE).write_bytes(changed)

    def measured(*sets: str) -> dict[str, float]:
        config = _config(world, tmp_path, Method("full"), heldout=sets)
        heldout = open_heldout(config.heldout_sets, AlignedRows(config.stream))
        return evaluate(config, student, heldout, Ranks(torch.device("cpu")))

    found = measured(f"first={world / 'heldout'}", str(tmp_path / "other"), str(world / "pair"))
    own = found["heldout_bits_per_byte/first"]
    assert list(found) == [f"heldout_bits_per_byte/{name}" for name in ("first", "other", "pair")]
    assert own == found["heldout_bits_per_byte/other"] != found["heldout_bits_per_byte/pair"]
    assert measured(f"first={world / 'heldout'}") == {"heldout_bits_per_byte": own}
    with pytest.raises(ValueError, match="have one name: write NAME=DATASET"):
        measured(str(world / "pair"), "x/pair")
    url = "s3://bucket/lang=en/heldout"
    named = _config(world, tmp_path, Method("full"), heldout=(url, f"own={url}")).heldout_sets
    assert named == {"heldout": url, "own": url}


def test_a_set_without_the_students_tokens_is_refused(world: Path, tmp_path: Path) -> None:
    build_dataset(tmp_path / "heldout", make_texts(6, seed=1), student=byte_level(440))
    config = _config(world, tmp_path, Method("full"), heldout=(str(tmp_path / "heldout"),))
    with pytest.raises(ForeignTokenizerError, match="align the held-out texts") as refused:
        open_heldout(config.heldout_sets, AlignedRows(config.stream))
    [hint] = hints_of(refused.value)
    _, *words, source, _, output = shlex.split(hint)
    assert words == ["vocag", "align", "--input", f"{tmp_path / 'heldout'}", "--student"]
    record = open_dataset(str(world / "pair")).manifest.student
    assert load_tokenizer(source).sha256 == record.sha256
    assert output == f"{tmp_path / 'heldout'}-2"


def test_removed_documents_count_on_neither_side(
    world: Path, tmp_path: Path, student: PreTrainedModel
) -> None:
    """Their bytes were counted: a student looked better than it was."""
    pytest.importorskip("apache_beam")
    texts = make_texts(6, seed=1)
    build_dataset(tmp_path / "all", texts)
    build_dataset(tmp_path / "rest", texts[2:])
    remove_documents(tmp_path / "all", *(name for name, _ in texts[:2]))
    sets = (str(tmp_path / "all"), str(tmp_path / "rest"))
    config = _config(world, tmp_path, Method("full"), seq_length=512, heldout=sets)
    heldout = open_heldout(config.heldout_sets, AlignedRows(config.stream))
    found, wanted = evaluate(config, student, heldout, Ranks(torch.device("cpu"))).values()
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_run_opens_each_dataset_once(
    six: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh or resumed, however often it measures."""
    opened: Counter[str] = Counter()

    def read_whole(url: str) -> bytes:
        opened[url] += url.endswith("manifest.json")
        return Path(url).read_bytes()

    monkeypatch.setattr("pipeline.dataset.dataset_reading.read_whole", read_whole)
    for stop in (2, 4):
        opened.clear()
        train(replace(six, output=tmp_path / "run", evaluate_every=1, exit_after=stop))
        folders = (six.data.path, *six.heldout)
        assert +opened == {f"{folder}/manifest.json": 1 for folder in folders}


def test_models_and_data_that_do_not_fit_are_refused(world: Path, tmp_path: Path) -> None:
    small = shutil.copytree(world / "student", tmp_path / "small")
    (small / "tokenizer.json").unlink()
    untrained, same = str(world / "teacher_start"), Reading(str(world / "same"))
    silent = Reading(str(world / "pair"), student_bos="none")
    other_student = r"student tokenizer .* is not the dataset's"
    for name, changes, error, message in (
        ("kld", {}, ValueError, "method=kld needs a teacher with the student's token"),
        ("alm", {"data": silent}, ValueError, r"method=alm compares .* by student_bos"),
        ("teacher", {"teacher": untrained}, UntrainedTeacherError, "learned row of the data is"),
        ("teacher", {"teacher": str(small)}, ValueError, r"holds teacher token 4\d\d in doc"),
        ("teacher", {"teacher": str(world / "student")}, ForeignTokenizerError, "is not the data"),
        ("full", {"student": untrained}, ForeignTokenizerError, other_student),
        ("full", {"student": untrained, "random_init": True}, ForeignTokenizerError, other_student),
        (
            "full",
            {"data": same, "student": str(small)},
            ValueError,
            r"holds student token 4\d\d in doc",
        ),
        (
            "full",
            {"num_steps": 10**6, "num_epochs": 1},
            ValueError,
            r"in 1 epoch: raise num_epochs, or lower num_steps \(to \d+\) or global_batch_size",
        ),
        (
            "full",
            {"num_steps": 10**6, "warmup_steps": 10**5},
            ValueError,
            r"or lower num_steps \(to \d+, warmup_steps below that\) or global_batch_size",
        ),
    ):
        with pytest.raises(error, match=message):
            train(_config(world, tmp_path / "run", Method(name), **changes))


def test_a_tokenizer_may_name_a_token_without_a_row(world: Path, tmp_path: Path) -> None:
    """As Gemma 3 1B and CodeLlama-Python: student and teacher, held-out text, kld's columns."""
    named = with_control_tokens(byte_level(400), "<image>")
    build_dataset(tmp_path / "data", make_texts(40), student=named, teacher=named)
    models = {
        name: str(write_model(tmp_path / name, named, seed=seed, num_rows=400))
        for seed, name in enumerate(("student", "teacher"))
    }
    data = {"data": Reading(str(tmp_path / "data")), "heldout": (str(tmp_path / "data"),)}
    given = {"num_steps": 1, "warmup_steps": 0, **models, **data}
    with pytest.raises(UntrainedTeacherError):  # not for want of rows
        train(_config(world, tmp_path / "run", Method("kld"), **given))
    batch = _rows(tmp_path / "data").__getitems__([0])
    loaded = [load_language_model(models[name]) for name in ("student", "teacher")]
    assert _loss(Method("kld"), *loaded, batch, vocab_size=named.vocab_size).loss_sum > 0
    plain = {**given, "teacher": None}
    assert train(_config(world, tmp_path / "plain", Method("full"), **plain))["loss"] > 0
    # Held-out text counts, too.
    spelled = with_control_tokens(byte_level(400), "<image>", special=False)
    texts = [("one", "An <image> here."), ("two", "None here.")]
    build_dataset(tmp_path / "held", texts, student=spelled, teacher=spelled, num_shards=1)
    build_dataset(tmp_path / "spelled", make_texts(40), student=spelled, teacher=spelled)
    (tmp_path / "student/tokenizer.json").write_bytes(spelled.file_bytes)
    given = {**plain, "data": Reading(str(tmp_path / "spelled")), "heldout": ()}
    assert train(_config(world, tmp_path / "spell", Method("full"), **given))["loss"] > 0
    held = {**given, "heldout": (str(tmp_path / "held"),)}
    with pytest.raises(ValueError, match=r'student token 400 in document "one" of \S*held '):
        train(_config(world, tmp_path / "other", Method("full"), **held))


def test_an_instruct_student_comes_back_as_one(tmp_path: Path, world: Path) -> None:
    chat = with_control_tokens(byte_level(400), "<|im_start|>", "<|im_end|>")
    build_dataset(tmp_path / "data", make_texts(40), student=chat)
    student = make_instruct(write_model(tmp_path / "student", chat), chat)
    given = {"num_steps": 1, "warmup_steps": 0, "student": str(student)}
    given |= {"data": Reading(str(tmp_path / "data"))}
    train(_config(world, tmp_path / "run", Method("full"), **given))
    own, trained = (AutoTokenizer.from_pretrained(f) for f in (student, tmp_path / "run/model"))
    turns = [{"role": "user", "content": "Two and two?"}]
    chats = [one.apply_chat_template(turns, tokenize=False) for one in (own, trained)]
    assert chats[0] == chats[1]
    ends = [chat.eos_token_id, chat.find_token("<|im_end|>")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == ends
    assert (trained.eos_token_id, model.generation_config.temperature) == (ends[0], 0.6)


def test_a_trained_student_brings_its_tokenizer(
    world: Path, six: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = list(read_documents(world / "pair").values())
    assert len(documents) == 40
    for name in ("step-000002", "model"):
        folder = six.output / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 400
        for document in documents:
            assert document.text is not None
            found = tokenizer(document.text.decode(), add_special_tokens=False)["input_ids"]
            assert found == document.student.input_ids.tolist()
    guide = str(world / "teacher_run" / "model")
    assert figures(["kept", "A fair coin.", "--student", str(folder), "--teacher", guide]) == 0
    assert "kept" in capsys.readouterr().out
    # What it leaves is a student of the same data again.
    train(_config(world, tmp_path, Method("full"), num_steps=3, student=str(folder)))


def test_a_new_student_with_other_logits_is_refused(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Granite's field were unknown; `load_language_model` refuses one with weights."""
    student = shutil.copytree(world / "student", tmp_path / "granite")
    about = json.loads((student / "config.json").read_text())
    changes = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    (student / "config.json").write_text(json.dumps(about | changes | {"logits_scaling": 8.0}))
    monkeypatch.setattr("pipeline.models.output_layer._DIVISORS", ())
    config = _config(world, tmp_path, Method("full"), student=str(student), random_init=True)
    with pytest.raises(UnknownLogitsError, match=r"GraniteForCausalLM \(granite\) computes its"):
        train(config)


@pytest.mark.parametrize(
    ("side", "place"), [("student", r"step 1 \(rows 0 to 3 of .*"), ("teacher", "")]
)
def test_a_broken_model_stops_the_run_and_names_the_rows(
    world: Path, tmp_path: Path, side: str, place: str
) -> None:
    sources = {"student": world / "student", "teacher": world / "teacher_run" / "model"}
    model = load_language_model(str(sources[side]))
    model.base_model.norm.weight.data.fill_(3e38)  # NaN itself is refused at load
    model.save_pretrained(tmp_path / side)
    config = _config(world, tmp_path / "run", Method("teacher"), **{side: str(tmp_path / side)})
    with pytest.raises(
        NonFiniteLossError, match=rf"{place}{side}_losses\[0, \d+\] is nan; .* in rows \[0"
    ):
        train(config)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_teachers_mean_loss_leaves_padding_out(tmp_path: Path, teacher: PreTrainedModel) -> None:
    build_dataset(tmp_path / "one", make_texts(1), num_shards=1)
    rows = _rows(tmp_path / "one", 512)
    batch = rows.__getitems__([0])
    assert batch["loss_mask"].mean() < 0.6
    (document,) = read_documents(tmp_path / "one").values()
    losses = _losses(teacher, document, "teacher", rows)
    spans = [slice(*span) for span in document.teacher_spans.tolist() if span[0] < span[1]]
    expected = sum(sum(losses[s]) / len(losses[s]) for s in spans) / len(spans)
    assert mean_teacher_loss(teacher, batch) == pytest.approx(expected, rel=1e-4)
    assert int((batch["teacher_position_ids"] > 0).sum()) > 2 * int(batch.teacher_has_loss.sum())
    assert torch.equal(compute_teacher_losses(teacher, batch).isnan(), ~batch.teacher_has_loss)


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


def _losses(
    model: torch.nn.Module, document: AlignedDocument, side: str, rows: AlignedRows
) -> list[float]:
    """Return the losses of a document's tokens (and of the student's EOS), one forward pass."""
    convention = getattr(rows.rules, side)
    end = [] if convention.end_token_id is None else [convention.end_token_id]
    ids = [convention.first_token_id, *getattr(document, side).input_ids.tolist(), *end]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(
        logits, torch.tensor(ids[1:]), reduction="none"
    ).tolist()
