"""`vocag evaluate` as a user starts it, on real models."""

import json
import math
import re
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file

from pipeline.command_line.folder_lock import hold_folder
from pipeline.evaluation.command import OUTPUT_LOCK, main
from pipeline.evaluation.results import read_results
from pipeline.evaluation.settings import StudentEngine
from pipeline.evaluation.students import find_student, name_of, open_model
from pipeline.tokenization.definition import text_template, token_names
from pipeline.training.command import main as train
from tests.support.datasets import build_dataset, byte_level
from tests.support.hf_folders import write_model

TINY = str(Path(__file__).parents[2] / "data" / "evaluation")


def student(folder: Path, vocab_size: int = 300, *, seed: int = 0, context: int = 512) -> Path:
    """A model with random weights, and a tokenizer that transformers knows the ends of."""
    write_model(folder, byte_level(vocab_size), seed=seed)
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    config = folder / "config.json"
    body = json.loads(config.read_text()) | {"max_position_embeddings": context}
    config.write_text(json.dumps(body))
    return folder


MODEL = "a model that is there"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--tasks", "gsm8k", "gsm9k"], "--tasks gsm9k: choose one of gsm8k, math, svamp"),
        (["a", "--measures", "luck"], "--measures luck: choose one of accuracy, text"),
        (["a", "--limit", "-1"], "--limit -1: it must be 0 or more"),
        (["a", "--batch-size", "0"], "--batch-size 0: it must be at least 1"),
        ([MODEL, "--data", "nowhere"], "--data nowhere: neither gsm8k.jsonl nor gsm8k/test.jsonl"),
        ([MODEL, "--device", "gpu"], "--device gpu: "),
        ([MODEL, "--device", "gpu"], "hint: --device cpu"),
        (["nobody", "--data", TINY], 'student "nobody": no such folder'),
        (["", "--data", TINY], 'student "": '),
        (
            [MODEL, "--data", TINY, "--tasks", "svamp", "--measures", "options"],
            "none of these sets allows any of these measures, but --measures accuracy text answer",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(student(tmp_path / "own")) if each == MODEL else each for each in arguments]
    assert main([*given, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("size", "hint"), [(9, "hint: --batch-size 4"), (1, "another device")])
def test_too_little_memory_is_told_in_a_line(
    size: int,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a GPU, at the first batch: torch's traceback was all that one saw."""

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(HFLM, "_model_call", fails)
    command = [str(student(tmp_path / "own")), "--data", TINY, "--output", str(tmp_path / "out")]
    more = ["--tasks", "mmlu_stem", "--measures", "options", "--device", "cpu"]
    assert main([*command, *more, "--batch-size", str(size)]) == 2
    told = capsys.readouterr().err
    assert "memory of cpu is too small for this student (CUDA out of memory. Tried to" in told
    assert told.splitlines()[-1].endswith(hint)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("runs/teacher/model", "teacher"),
        ("./runs/seed-0/full/model/", "full"),
        ("demo/checkpoint/iter_0000030", "demo"),
        ("model", "model"),
        ("owner/name@v1", "name"),
        ("models/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"),
    ],
)
def test_a_student_is_called_by_its_run(source: str, name: str) -> None:
    assert name_of(source) == name


def test_two_students_of_different_vocabularies_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contexts of 512 tokens: too short for worked examples, which is said, not hidden."""
    output = tmp_path / "evaluated"
    for name, vocab_size in (("small", 300), ("large", 400)):
        folder = student(tmp_path / name, vocab_size)
        command = [str(folder), "--data", TINY, "--output", str(output), "--device", "cpu"]
        assert main([*command, "--tasks", "gsm8k", "mmlu_stem"]) == 0
    text = capsys.readouterr().out
    assert "GSM8K, accuracy, 0 items: not asked: the longest prompt has" in text
    assert "note: a different file from math-evaluation-harness's: GSM8K, MMLU-STEM" in text
    found = {name: read_results(output / name) for name in ("small", "large")}
    for results in found.values():
        value = results.measurements["gsm8k"]["solution"].values["bits_per_byte"]
        assert 3 < value.value < 12, "random weights spread over the vocabulary"
        assert set(results.measurements["mmlu_stem"]) == {"accuracy", "text", "answer", "options"}
    assert found["small"].sha256 != found["large"].sha256
    page = (output / "report.html").read_text("utf-8")
    assert page.count("<svg") >= 5
    for words in ("small", "large", "MMLU-STEM", "not asked", "Choice by likelihood"):
        assert words in page


def test_one_table_adds_measures_and_does_not_mix_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(folder: Path, *arguments: str) -> int:
        return main([str(folder), "--data", TINY, "--output", str(output), *arguments])

    one, output = student(tmp_path / "one"), tmp_path / "evaluated"
    assert evaluate(one, "--device", "cpu", "--tasks", "svamp", "--measures", "answer") == 0
    assert evaluate(one, "--device", "cpu", "--tasks", "mawps", "--measures", "text") == 0
    made = read_results(output / "one").measurements
    assert {name: list(measures) for name, measures in made.items()} == {
        "svamp": ["answer"],
        "mawps": ["text"],
    }
    assert evaluate(one, "--dtype", "bfloat16") == 2
    assert "has results with --dtype auto, this run has bfloat16" in capsys.readouterr().err
    other = student(tmp_path / "other" / "one", seed=1)
    assert evaluate(Path(f"one={other}")) == 2
    told = capsys.readouterr().err
    assert "has results of a different student" in told
    assert f"name this one, NAME={other}, or" in told


def test_results_that_another_process_writes_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, output = student(tmp_path / "one"), tmp_path / "evaluated"
    with hold_folder(str(output / "one" / OUTPUT_LOCK), str(output)):
        assert main([str(one), "--data", TINY, "--output", str(output), "--device", "cpu"]) == 2
    assert f"writes to {output}; wait until it has ended" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".results.json.tmp", "samples/.svamp.text.jsonl.tmp"])
def test_a_full_disk_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, output = student(tmp_path / "one"), tmp_path / "evaluated"
    full = output / "one" / name
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    asked = ["--tasks", "svamp", "--measures", "text", "--device", "cpu", "--data", TINY]
    assert main([str(one), *asked, "--output", str(output)]) == 2
    assert f"{output} can't be written, for its disk is full" in capsys.readouterr().err


def test_a_tokenizer_without_ends_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "one", byte_level(300))
    assert main([str(folder), "--data", TINY, "--output", str(tmp_path), "--device", "cpu"]) == 2
    assert "names neither a BOS nor an EOS token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((slice(200), 1.0), r"one: token \d+ exceeds the model's 200 rows: give it the tokenizer"),
        ((slice(None), math.nan), "one: its logits aren't numbers: it diverged in training"),
    ],
)
def test_a_student_that_gives_no_numbers_is_refused(
    change: tuple[slice, float], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of torch's index, and results that nobody could read, were what one got."""
    folder, output = student(tmp_path / "one"), tmp_path / "evaluated"
    weights, name = load_file(folder / "model.safetensors"), "model.embed_tokens.weight"
    kept, factor = change
    weights[name] = weights[name][kept] * factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = len(weights[name])
    (folder / "config.json").write_text(json.dumps(config))
    command = [str(folder), "--data", TINY, "--output", str(output), "--device", "cpu"]
    assert main([*command, "--tasks", "svamp", "--measures", "text"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (output / "one" / "results.json").exists()


def test_other_ends_make_another_student(tmp_path: Path) -> None:
    """They end its answers, and kept ones would be taken for those."""
    folder, found = student(tmp_path / "one"), set()
    for ends in ([1], [1, 7]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        found.add(find_student(str(folder)).sha256)
    assert len(found) == 2


def test_a_model_s_own_penalties_change_no_greedy_answer(tmp_path: Path) -> None:
    answers = []
    for name, own in (("plain", {}), ("own", {"repetition_penalty": 5.0, "num_beams": 2})):
        folder = student(tmp_path / name)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **own}))
        model = open_model(find_student(str(folder)), StudentEngine(device="cpu"))
        how = {"until": [], "max_gen_toks": 16, "do_sample": False}
        answers += model.generate_until([Instance("generate_until", {}, ("One and one", how), 0)])
    assert answers[0] == answers[1] != ""


def test_a_tokenizer_that_ends_every_prompt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval would count the end in the place of an answer's first token."""
    folder = student(tmp_path / "one")
    body = json.loads((folder / "tokenizer.json").read_text())
    body["post_processor"] = text_template([0], [1], token_names(body))
    (folder / "tokenizer.json").write_text(json.dumps(body))
    assert main([str(folder), "--data", TINY, "--output", str(tmp_path), "--device", "cpu"]) == 2
    assert "its tokenizer puts tokens behind a text" in capsys.readouterr().err


def test_a_student_without_a_tokenizer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = student(tmp_path / "one")
    (folder / "tokenizer.json").unlink()
    assert main([str(folder), "--data", TINY, "--output", str(tmp_path), "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert f"student {folder}: its tokenizer can't be loaded (no tokenizer.json is there)" in told


def test_a_student_whose_weights_did_not_all_load_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, lost = student(tmp_path / "one"), "model.layers.1.mlp.down_proj.weight"
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for task, measure in (("svamp", "answer"), ("mawps", "text"), ("mmlu_stem", "options")):
        asked = ["--tasks", task, "--measures", measure, "--device", "cpu", "--data", TINY]
        assert main([str(folder), *asked, "--output", str(tmp_path / measure)]) == 2
        assert f"1 missing ({lost}): download" in capsys.readouterr().err


@pytest.mark.slow
def test_a_student_that_vocag_train_leaves_goes_through_all_nine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_dataset(tmp_path / "aligned", student=byte_level(300))
    student(tmp_path / "start", context=8192)
    run = tmp_path / "runs" / "full"
    options = "--method full --num-steps 2 --warmup-steps 1 --seq-length 128 --random-init"
    options += " --global-batch-size 1 --micro-batch-size 1 --device cpu"
    places = ["--data", str(tmp_path / "aligned"), "--student", str(tmp_path / "start")]
    assert train([*places, *options.split(), "--output", str(run)]) == 0
    command = [str(run / "model"), "--data", TINY, "--output", str(tmp_path / "evaluated")]
    command += ["--limit", "1", "--max-answer-tokens", "8", "--device", "cpu"]
    assert main(command) == 0
    made = read_results(tmp_path / "evaluated" / "full").measurements
    assert len(made) == 9
    for measures in made.values():
        assert measures["accuracy"].num_items == 1
        assert measures["accuracy"].answer_tokens == 8
    capsys.readouterr()
    log = next((tmp_path / "evaluated" / "full").glob("answers-*.jsonl"))
    before = log.read_bytes()
    assert main(command) == 0, "again: everything is known"
    assert log.read_bytes() == before
