"""The trainer: exact resume, exact accumulation, and each method against a slow count."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.dataset.files import open_dataset
from pipeline.figures.command import main as figures
from pipeline.guidance import NonFiniteLossError
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import UnknownLogitsError
from pipeline.models.probe import UntrainedTeacherError
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.training.command import main, what_next
from pipeline.training.config import TrainConfig
from pipeline.training.evaluation import evaluate, open_heldout
from pipeline.training.loop import train
from pipeline.training.losses import batch_loss
from pipeline.training.method import Method
from pipeline.training.models import mean_teacher_loss
from pipeline.training.options import parse_config
from pipeline.training.ranks import Ranks
from pipeline.training.schedule import learning_rate
from pipeline.training.student_pass import compute_teacher_losses
from schemas.document import AlignedDocument, decode_document
from schemas.errors import ForeignTokenizerError
from schemas.manifest import MANIFEST_FILE, ConventionRecord, encode_manifest
from tests.support.datasets import build_dataset, byte_level, make_texts
from tests.support.hf_folders import write_model

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
    config = TrainConfig(
        data=Reading(str(root / "same")),
        student=str(root / "teacher_start"),
        output=root / "teacher_run",
        method=Method("full"),
        num_steps=30,
        warmup_steps=2,
        seq_length=SEQ_LENGTH,
        global_batch_size=4,
        num_epochs=20,
        learning_rate=1e-2,
    )
    train(config)
    return root


def _config(world: Path, output: Path, method: Method, **changes: object) -> TrainConfig:
    config = TrainConfig(
        data=Reading(str(world / "pair")),
        student=str(world / "student"),
        teacher=str(world / "teacher_run" / "model"),
        output=output,
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


def _weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


@pytest.mark.parametrize("name", ["teacher", "random"])
def test_six_steps_equal_three_a_restart_and_three(world: Path, tmp_path: Path, name: str) -> None:
    method = Method(name)
    heldout = {"heldout": (str(world / "heldout"),), "evaluate_every": 2}
    train(_config(world, tmp_path / "six", method, **heldout))
    train(_config(world, tmp_path / "three", method, **heldout, exit_after=3))
    assert not (tmp_path / "three" / "model").exists()
    with (tmp_path / "three" / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": "of a step that the checkpoint does not know"}\n')
    train(_config(world, tmp_path / "three", method, **heldout))
    six, three = (_weights(tmp_path / run) for run in ("six", "three"))
    assert six.keys() == three.keys()
    assert all(torch.equal(six[key], three[key]) for key in six)
    logs = []
    for run in ("six", "three"):
        records = [json.loads(line) for line in (tmp_path / run / "log.jsonl").open()]
        logs.append([{k: v for k, v in record.items() if k != "seconds"} for record in records])
    assert logs[0] == logs[1]
    assert [record["step"] for record in logs[0]] == [1, 2, 3, 4, 5, 6]
    assert sum("heldout_bits_per_byte" in record for record in logs[0]) == 3


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
    six, three = (_weights(tmp_path / run) for run in ("six", "three"))
    assert all(torch.equal(six[key], three[key]) for key in six)
    moved = [*command, str(tmp_path / "moved"), "--generation"]
    assert main([*moved, "1"]) == 2
    assert "generation 0 of" in capsys.readouterr().err
    assert main([*moved, "latest"]) == 0
    assert not all(torch.equal(six[k], v) for k, v in _weights(tmp_path / "moved").items())


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
    six, three = (_weights(tmp_path / run) for run in ("six", "three"))
    assert all(torch.equal(six[key], three[key]) for key in six)
    records = [json.loads(line) for line in (tmp_path / "three" / "log.jsonl").open()]
    rows = AlignedRows(_config(world, tmp_path, Method("full"), **changes).stream)
    read, num_held = {"pair": 0, "more": 0}, 0
    for step, record in enumerate(records):
        if 4 * step + 4 <= rows.plan.stretches[0].stop:
            tokens = [record[f"tokens/{name}"] for name in read]
            assert abs(tokens[0] - 0.75 * sum(tokens)) <= SEQ_LENGTH, "the weight to one row"
            num_held += 1
        for position in range(4 * step, 4 * step + 4):
            read[rows.source_of(position)] += 1
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
    with pytest.raises(ValueError, match=r"--num-epochs 4: a mixture's file says how often"):
        train(replace(config, num_epochs=4))
    with pytest.raises(ValueError, match=r"900 steps need 3600 rows, .*toml has \d+ .* max_epochs"):
        train(replace(config, num_steps=900))
    with pytest.raises(ValueError, match=r"--heldout mixture.toml=.* is a mixture: name its datas"):
        train(replace(config, heldout=(str(mixture),)))


def test_tensorboard_gets_every_step(world: Path, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(_config(world, tmp_path, Method("full"), num_steps=3, tensorboard=True))
    events = accumulators.EventAccumulator(str(tmp_path)).Reload()
    logged = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").open()]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(logged)


def test_accumulation_changes_nothing_but_rounding(world: Path, tmp_path: Path) -> None:
    method = Method("teacher", scope="row", keep_fraction=0.3)
    for size in (1, 4):
        train(_config(world, tmp_path / f"{size}", method, micro_batch_size=size, num_steps=3))
    one, four = _weights(tmp_path / "1"), _weights(tmp_path / "4")
    start = load_file(world / "student" / "model.safetensors")
    for key in one:
        torch.testing.assert_close(one[key], four[key], rtol=1e-3, atol=1e-5)
    assert any((one[key] - start[key]).abs().max() > 1e-3 for key in one)


@pytest.mark.parametrize("keep_fraction", [None, 0.4])
def test_alm_adds_divergences_to_the_cross_entropy_of_the_kept_tokens(
    world: Path, keep_fraction: float | None
) -> None:
    rows = AlignedRows(StreamConfig(Reading(str(world / "pair")), seq_length=SEQ_LENGTH))
    batch = rows.__getitems__([0, 1])
    student = load_language_model(str(world / "student"))
    teacher = load_language_model(str(world / "teacher_run" / "model"))
    result = batch_loss(
        Method("alm", keep_fraction=keep_fraction, weight=2.0), student, teacher, batch, 0
    )
    chosen = Method("teacher", keep_fraction=keep_fraction or 0.0)
    selected = batch_loss(chosen, student, teacher, batch, 0)
    divergence, count = result.metrics["divergence"].tolist()
    assert divergence > 1
    assert count == float(result.num_tokens) == float(batch["loss_mask"].sum())
    expected = float(selected.loss_sum.detach()) + 2.0 * divergence
    assert float(result.loss_sum.detach()) == pytest.approx(expected, rel=1e-5)
    kept = result.metrics["kept_fraction"].tolist()
    assert kept == selected.metrics["kept_fraction"].tolist()
    assert (kept[0] > 0.3 * kept[1]) == (keep_fraction is not None)


def test_alm_learns_and_refuses_texts_whose_first_token_has_no_loss(
    world: Path, tmp_path: Path
) -> None:
    longer = {"num_steps": 30, "num_epochs": 20, "learning_rate": 1e-2}
    config = _config(world, tmp_path / "run", Method("alm"), **longer)
    found = [json.loads(line)["divergence"] for line in _train_log(config)]
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    silent = Reading(str(world / "pair"), student_bos="none")
    with pytest.raises(ValueError, match=r"--method alm compares .*: name one by --student-bos"):
        train(_config(world, tmp_path / "none", Method("alm"), data=silent))


def _train_log(config: TrainConfig) -> list[str]:
    train(config)
    return (config.output / "log.jsonl").read_text("utf-8").splitlines()


@pytest.mark.parametrize("how", ["mean", "max", "sum"])
def test_guided_loss_equals_a_slow_count_over_documents(world: Path, how: str) -> None:
    """Score each document alone with the models' own logits, choose by sorting."""
    rows = AlignedRows(StreamConfig(Reading(str(world / "pair")), seq_length=512))
    batch = rows.__getitems__(list(range(len(rows))))
    student = load_language_model(str(world / "student"))
    teacher = load_language_model(str(world / "teacher_run" / "model"))
    result = batch_loss(
        Method("teacher", unmapped="exclude", aggregation=how), student, teacher, batch, 0
    )
    phi = {"mean": lambda x: sum(x) / len(x), "max": max, "sum": sum}[how]
    scored = []
    documents = _documents(world / "pair")
    for document in documents:
        of_student = _losses(student, document, "student", rows)
        of_teacher = _losses(teacher, document, "teacher", rows)
        for token, (start, end) in enumerate(document.teacher_spans.tolist()):
            if start < end:
                guidance = phi(of_teacher[start:end])
                scored.append((of_student[token] - guidance, of_student[token]))
    scored.sort(reverse=True)
    kept = [loss for _, loss in scored[: int(0.4 * len(scored))]]
    assert len(documents) == 40
    assert int(result.num_tokens) == len(kept)
    assert result.loss_sum.item() == pytest.approx(sum(kept), rel=1e-4)


def test_bits_per_byte_equal_a_slow_count(world: Path, tmp_path: Path) -> None:
    """Of the text alone: neither what stands before a document nor its end is charged."""
    student = load_language_model(str(world / "student"))
    heldout = str(world / "heldout")
    config = _config(world, tmp_path, Method("full"), seq_length=512, heldout=(heldout,))
    rows = AlignedRows(StreamConfig(Reading(heldout, student_eos="none"), seq_length=512))
    documents = _documents(world / "heldout")
    nats = sum(sum(_losses(student, document, "student", rows)) for document in documents)
    num_bytes = sum(document.num_text_bytes for document in documents)
    # Whole documents in a row, as the slow count has them.
    training = AlignedRows(config.stream)
    assert training.rules.student.end_token_id is not None
    sets = open_heldout(config, training)
    measured = evaluate(config, student, sets, Ranks(torch.device("cpu")))
    assert measured["heldout_bits_per_byte"] == pytest.approx(
        nats / math.log(2) / num_bytes, rel=1e-4
    )


@pytest.mark.parametrize("name", ["full", "random", "student_loss", "student_entropy", "uld",
                                  "teacher_loss", "chunks", "chunks_random"])  # fmt: skip
def test_methods_of_two_vocabularies_train(world: Path, tmp_path: Path, name: str) -> None:
    values = train(_config(world, tmp_path, Method(name, num_chunks=4), num_steps=3))
    assert 0 < values["loss"] < 12
    assert values["gradient_norm"] > 0
    share = values.get("kept_fraction", 1.0)
    assert share == 1.0 if name in ("full", "uld") else 0.2 < share < 0.6
    assert ("teacher_loss" in values) == (name in ("chunks", "teacher_loss"))


@pytest.mark.parametrize("name", ["kld", "rho1", "rho1_self"])
def test_methods_of_one_vocabulary_train(world: Path, tmp_path: Path, name: str) -> None:
    changes = {"data": Reading(str(world / "same")), "student": str(world / "teacher_start")}
    values = train(_config(world, tmp_path, Method(name), num_steps=3, **changes))
    assert 0 < values["loss"] < 12
    assert values["divergence"] > 0 if name == "kld" else 0.45 < values["kept_fraction"] < 0.7


@pytest.mark.parametrize("name", ["kld", "uld"])
def test_a_student_that_is_its_teacher_has_no_divergence(world: Path, name: str) -> None:
    model = load_language_model(str(world / "teacher_run" / "model"))
    rows = AlignedRows(StreamConfig(Reading(str(world / "same")), seq_length=256))
    result = batch_loss(Method(name), model, model, rows.__getitems__([0, 1]), 0)
    assert float(result.metrics["divergence"][0]) == pytest.approx(0, abs=1e-2)
    assert float(result.metrics["student_loss"][0]) > 10


def test_kld_disregards_rows_that_are_no_tokens(world: Path, tmp_path: Path) -> None:
    """A teacher with more padding than the student, as Llemma's 32,016 rows for 32,000 tokens."""
    rows = AlignedRows(StreamConfig(Reading(str(world / "same")), seq_length=256))
    student = load_language_model(str(world / "teacher_start"))
    teacher = load_language_model(str(world / "teacher_run" / "model"))
    batch, vocab_size = rows.__getitems__([0]), rows.manifest.student.vocab_size
    alone = batch_loss(Method("kld"), student, teacher, batch, 0, vocab_size=vocab_size)
    teacher.resize_token_embeddings(vocab_size + 16, mean_resizing=False)
    weight = teacher.get_output_embeddings().weight.data
    weight[vocab_size:] = 10 * weight[:16]
    with pytest.raises(
        ValueError, match=rf"{vocab_size} and the teacher {vocab_size + 16} columns"
    ):
        batch_loss(Method("kld"), student, teacher, batch, 0)
    padded = batch_loss(Method("kld"), student, teacher, batch, 0, vocab_size=vocab_size)
    assert padded.loss_sum.item() == pytest.approx(alone.loss_sum.item(), rel=1e-6)
    weight[vocab_size:] = 0
    teacher.save_pretrained(tmp_path / "padded")
    changes = {"data": Reading(str(world / "same")), "student": str(world / "teacher_start")}
    config = _config(world, tmp_path / "run", Method("kld"), num_steps=3, **changes)
    assert train(replace(config, teacher=str(tmp_path / "padded")))["divergence"] > 0


def test_random_choices_differ_between_steps(world: Path) -> None:
    model = load_language_model(str(world / "student"))
    rows = AlignedRows(StreamConfig(Reading(str(world / "pair")), seq_length=256))
    losses = {
        batch_loss(Method("random"), model, None, rows.__getitems__([0]), step).loss_sum.item()
        for step in (0, 0, 1, 2)
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
    with pytest.raises(ValueError, match="--schedule square: choose of cosine, linear, constant"):
        TrainConfig(**common, schedule="square")


def test_rows_have_the_teachers_length_that_is_asked_for(world: Path, tmp_path: Path) -> None:
    """Scores made with a length of their own could not be trained with."""
    config = _config(world, tmp_path, Method("teacher"), teacher_seq_length=96)
    rows = AlignedRows(config.stream)
    assert rows[0]["teacher_input_ids"].shape == (96,)
    assert train(replace(config, num_steps=3))["teacher_loss"] > 0
    message = r"a row holds 600 teacher tokens, .* for 512: lower --teacher-seq-length"
    with pytest.raises(ValueError, match=message):
        train(replace(config, teacher_seq_length=600, output=tmp_path / "long"))


def test_held_out_text_stands_among_the_tokens_of_the_training_text(
    world: Path, tmp_path: Path
) -> None:
    """Whatever was recorded when it was aligned: the student knows no other tokens."""
    manifest = build_dataset(tmp_path / "other", make_texts(6, seed=1))
    other = replace(manifest.student, convention=ConventionRecord(5, 5, None))
    changed = encode_manifest(replace(manifest, student=other))
    (tmp_path / "other" / MANIFEST_FILE).write_bytes(changed)
    sets = (str(world / "heldout"), str(tmp_path / "other"))
    values = train(_config(world, tmp_path / "run", Method("full"), num_steps=3, heldout=sets))
    measured = {name: value for name, value in values.items() if name.startswith("heldout")}
    assert len(measured) == 2
    assert len(set(measured.values())) == 1


def test_several_held_out_sets_are_logged_by_name(world: Path, tmp_path: Path) -> None:
    sets = (f"first={world / 'heldout'}", str(world / "pair"))
    values = train(_config(world, tmp_path, Method("full"), num_steps=3, heldout=sets))
    measured = {name: value for name, value in values.items() if name.startswith("heldout")}
    assert list(measured) == ["heldout_bits_per_byte/first", "heldout_bits_per_byte/pair"]
    alone = train(_config(world, tmp_path / "one", Method("full"), num_steps=3, heldout=sets[:1]))
    assert alone["heldout_bits_per_byte"] == measured["heldout_bits_per_byte/first"]
    with pytest.raises(ValueError, match="have one name: write NAME=DATASET"):
        _config(world, tmp_path, Method("full"), heldout=(str(world / "pair"), "x/pair"))


def test_weights_and_biases_gets_every_step(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(_config(world, tmp_path / "run", Method("full"), num_steps=3, wandb="tests"))
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert log.stat().st_size > 0


def test_a_missing_package_is_named(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ValueError, match="--wandb tests needs a package: pip install wandb"):
        train(_config(world, tmp_path, Method("full"), wandb="tests"))
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_checkpoint_of_other_options_is_refused(world: Path, tmp_path: Path) -> None:
    config = _config(world, tmp_path, Method("full"), num_steps=3, exit_after=2)
    train(config)
    with pytest.raises(ValueError, match=r"made with learning_rate 0\.001, this run has 0\.01"):
        train(replace(config, learning_rate=0.01))


def test_models_and_data_that_do_not_fit_are_refused(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--method kld needs a teacher with the student's token"):
        train(_config(world, tmp_path, Method("kld")))
    untrained = str(world / "teacher_start")
    with pytest.raises(UntrainedTeacherError, match=r"the first row of the data is .* not load"):
        train(_config(world, tmp_path, Method("teacher"), teacher=untrained))
    small = shutil.copytree(world / "student", tmp_path / "small")
    (small / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="teacher tokens up to 479"):
        train(_config(world, tmp_path, Method("teacher"), teacher=str(small)))
    with pytest.raises(ValueError, match=r"raise --num-epochs, .* or lower --num-steps"):
        train(_config(world, tmp_path, Method("full"), num_steps=10**6))


def test_a_trained_student_brings_its_tokenizer(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(_config(world, tmp_path / "run", Method("full"), num_steps=3, export_every=2))
    for name in ("step-000002", "model"):
        folder = tmp_path / "run" / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 400
        documents = _documents(world / "pair")
        assert len(documents) == 40
        for document in documents:
            assert document.text is not None
            found = tokenizer(document.text.decode(), add_special_tokens=False)["input_ids"]
            assert found == document.student.input_ids.tolist()
    teacher = str(world / "teacher_run" / "model")
    assert figures(["kept", "A fair coin.", "--student", str(folder), "--teacher", teacher]) == 0
    assert "kept" in capsys.readouterr().out
    # What it leaves is a student of the same data again.
    train(_config(world, tmp_path / "next", Method("full"), num_steps=3, student=str(folder)))


def test_models_of_other_tokenizers_are_refused(world: Path, tmp_path: Path) -> None:
    """As Megatron does; it was taken without a word."""
    other = str(world / "teacher_start")
    with pytest.raises(ForeignTokenizerError, match=r"student tokenizer .* is not the dataset's"):
        train(_config(world, tmp_path, Method("full"), student=other))
    with pytest.raises(ForeignTokenizerError, match=r"student tokenizer .* is not the dataset's"):
        train(_config(world, tmp_path, Method("full"), student=other, random_init=True))
    with pytest.raises(ForeignTokenizerError, match=r"teacher tokenizer .* is not the dataset's"):
        train(_config(world, tmp_path, Method("teacher"), teacher=str(world / "student")))
    small = shutil.copytree(world / "student", tmp_path / "small")
    (small / "tokenizer.json").unlink()
    same = {"data": Reading(str(world / "same")), "student": str(small)}
    with pytest.raises(ValueError, match=r"the data has student tokens up to 479 .*, .* knows 400"):
        train(_config(world, tmp_path, Method("full"), **same))


def test_a_student_whose_logits_are_computed_otherwise_is_refused(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights drawn anew, too; as if Granite's field were unknown."""
    student = shutil.copytree(world / "student", tmp_path / "granite")
    about = json.loads((student / "config.json").read_text())
    changes = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    (student / "config.json").write_text(json.dumps(about | changes | {"logits_scaling": 8.0}))
    monkeypatch.setattr("pipeline.models.output_layer._DIVISORS", ())
    for random_init in (False, True):
        with pytest.raises(
            UnknownLogitsError, match=r"GraniteForCausalLM \(granite\) computes its"
        ):
            train(
                _config(
                    world, tmp_path, Method("full"), student=str(student), random_init=random_init
                )
            )


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_broken_model_stops_the_run_and_names_the_rows(
    world: Path, tmp_path: Path, side: str
) -> None:
    sources = {"student": world / "student", "teacher": world / "teacher_run" / "model"}
    model = load_language_model(str(sources[side]))
    model.base_model.norm.weight.data[0] = math.nan
    model.save_pretrained(tmp_path / side)
    config = _config(world, tmp_path / "run", Method("teacher"), **{side: str(tmp_path / side)})
    with pytest.raises(
        NonFiniteLossError, match=rf"{side}_losses\[0, \d+\] is nan; .* in rows \[0"
    ):
        train(config)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_teachers_mean_loss_leaves_padding_out(world: Path, tmp_path: Path) -> None:
    build_dataset(tmp_path / "one", make_texts(1), num_shards=1)
    rows = AlignedRows(StreamConfig(Reading(str(tmp_path / "one")), seq_length=512))
    teacher = load_language_model(str(world / "teacher_run" / "model"))
    batch = rows.__getitems__([0])
    assert batch["loss_mask"].mean() < 0.6
    (document,) = _documents(tmp_path / "one")
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
    assert parse_config([*needed, "--stored-losses", ""]).stored_losses == "", "the only ones"
    assert main([*needed, "--method", "teacher"]) == 2
    assert "--method teacher needs --teacher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("exit_after", "said"),
    [
        (None, "next: vocag evaluate 'a run/model' --output evaluated"),
        (5, "leave out --exit-after"),
    ],
)
def test_a_run_ends_with_what_to_do_next(exit_after: int | None, said: str) -> None:
    config = TrainConfig(
        data=Reading("d"), student="s", teacher="t", output=Path("a run"), exit_after=exit_after
    )
    lines = list(what_next(config))
    assert said in lines[-1]
    assert ("a run/model" in lines[0]) == (exit_after is None)


def _documents(folder: Path) -> list[AlignedDocument]:
    dataset = open_dataset(str(folder))
    documents = []
    for shard_index in range(len(dataset.manifest.shards)):
        index = dataset.read_index(shard_index, with_names=True)
        samples = dataset.samples(shard_index, index)
        documents += [decode_document(bytes(sample)) for _, sample in samples]
    return documents


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
