"""What a run opens and returns: models and data that fit, and tokenizers that come along."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.command_line.failures import hints_of
from pipeline.figures.command import main as figures
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import UnknownLogitsError
from pipeline.models.probe import UntrainedTeacherError
from pipeline.streaming import Reading
from pipeline.training.config import TrainConfig
from pipeline.training.loop import train
from schemas.errors import ForeignTokenizerError
from tests.support.datasets import (
    build_dataset,
    byte_level,
    make_texts,
    read_documents,
    with_control_tokens,
)
from tests.support.hf_folders import make_instruct, write_model
from tests.support.training_runs import loss_of, pair_config, rows_of


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


def test_models_and_data_that_do_not_fit_are_refused(lab: Path, tmp_path: Path) -> None:
    small = shutil.copytree(lab / "student", tmp_path / "small")
    (small / "tokenizer.json").unlink()
    untrained, same = str(lab / "teacher_start"), Reading(str(lab / "same"))
    silent = Reading(str(lab / "pair"), student_bos="none")
    other_student = r"student tokenizer .* is not the dataset's"
    for name, changes, error, message in (
        ("kld", {}, ValueError, "method=kld needs a teacher with the student's token"),
        ("alm", {"data": silent}, ValueError, r"method=alm compares .* by student_bos"),
        ("teacher", {"teacher": untrained}, UntrainedTeacherError, "learned row of the data is"),
        ("teacher", {"teacher": str(small)}, ValueError, r"holds teacher token 4\d\d in doc"),
        ("teacher", {"teacher": str(lab / "student")}, ForeignTokenizerError, "is not the data"),
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
            train(pair_config(lab, tmp_path / "run", Method(name), **changes))


def test_a_tokenizer_may_name_a_token_without_a_row(lab: Path, tmp_path: Path) -> None:
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
        train(pair_config(lab, tmp_path / "run", Method("kld"), **given))
    batch = rows_of(tmp_path / "data").__getitems__([0])
    loaded = [load_language_model(models[name]) for name in ("student", "teacher")]
    assert loss_of(Method("kld"), *loaded, batch, vocab_size=named.vocab_size).loss_sum > 0
    plain = {**given, "teacher": None}
    assert train(pair_config(lab, tmp_path / "plain", Method("full"), **plain))["loss"] > 0
    # Held-out text counts, too.
    spelled = with_control_tokens(byte_level(400), "<image>", special=False)
    texts = [("one", "An <image> here."), ("two", "None here.")]
    build_dataset(tmp_path / "held", texts, student=spelled, teacher=spelled, num_shards=1)
    build_dataset(tmp_path / "spelled", make_texts(40), student=spelled, teacher=spelled)
    (tmp_path / "student/tokenizer.json").write_bytes(spelled.file_bytes)
    given = {**plain, "data": Reading(str(tmp_path / "spelled")), "heldout": ()}
    assert train(pair_config(lab, tmp_path / "spell", Method("full"), **given))["loss"] > 0
    held = {**given, "heldout": (str(tmp_path / "held"),)}
    with pytest.raises(ValueError, match=r'student token 400 in document "one" of \S*held '):
        train(pair_config(lab, tmp_path / "other", Method("full"), **held))


def test_an_instruct_student_comes_back_as_one(tmp_path: Path, lab: Path) -> None:
    chat = with_control_tokens(byte_level(400), "<|im_start|>", "<|im_end|>")
    build_dataset(tmp_path / "data", make_texts(40), student=chat)
    student = make_instruct(write_model(tmp_path / "student", chat), chat)
    given = {"num_steps": 1, "warmup_steps": 0, "student": str(student)}
    given |= {"data": Reading(str(tmp_path / "data"))}
    train(pair_config(lab, tmp_path / "run", Method("full"), **given))
    own, trained = (AutoTokenizer.from_pretrained(f) for f in (student, tmp_path / "run/model"))
    turns = [{"role": "user", "content": "Two and two?"}]
    chats = [one.apply_chat_template(turns, tokenize=False) for one in (own, trained)]
    assert chats[0] == chats[1]
    ends = [chat.eos_token_id, chat.find_token("<|im_end|>")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == ends
    assert (trained.eos_token_id, model.generation_config.temperature) == (ends[0], 0.6)


def test_a_trained_student_brings_its_tokenizer(
    lab: Path, six: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = list(read_documents(lab / "pair").values())
    assert len(documents) == 40
    for name in ("step-000002", "model"):
        folder = six.output / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 400
        for document in documents:
            assert document.text is not None
            found = tokenizer(document.text.decode(), add_special_tokens=False)["input_ids"]
            assert found == document.student.input_ids.tolist()
    guide = str(lab / "teacher_run" / "model")
    assert figures(["kept", "A fair coin.", "--student", str(folder), "--teacher", guide]) == 0
    assert "kept" in capsys.readouterr().out
    # What it leaves is a student of the same data again.
    train(pair_config(lab, tmp_path, Method("full"), num_steps=3, student=str(folder)))


def test_a_new_student_with_other_logits_is_refused(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Granite's field were unknown; `load_language_model` refuses one with weights."""
    student = shutil.copytree(lab / "student", tmp_path / "granite")
    about = json.loads((student / "config.json").read_text())
    changes = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    (student / "config.json").write_text(json.dumps(about | changes | {"logits_scaling": 8.0}))
    monkeypatch.setattr("pipeline.models.output_layer._DIVISORS", ())
    config = pair_config(lab, tmp_path, Method("full"), student=str(student), random_init=True)
    with pytest.raises(UnknownLogitsError, match=r"GraniteForCausalLM \(granite\) computes its"):
        train(config)
