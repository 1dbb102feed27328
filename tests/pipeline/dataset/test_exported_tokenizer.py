"""An exported tokenizer, loaded as users load it, gives the dataset's ids."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.dataset.conventions import choose_conventions
from pipeline.dataset.files import open_dataset
from pipeline.models.exported_tokenizer import ExportedTokenizer, export_tokenizer
from pipeline.tokenization import TokenizerError, load_tokenizer
from pipeline.tokenization.definition import text_template, token_names
from schemas.manifest import MANIFEST_FILE, ConventionRecord, encode_manifest
from tests.support.datasets import build_dataset, byte_level, make_texts, store_tokenizer
from tests.support.hf_folders import write_model
from tests.support.tokenizer_zoo import load, write_definition

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 400}
SPELLED = ("mistral_v1", "sentencepiece_bpe", "qwen_like")
STUDENTS = (
    *("sentencepiece_bpe", "sentencepiece_nfkc", "sentencepiece_unigram", "mistral_v1"),
    *("llama_like", "qwen_like", "gpt2_like", "byte_incomplete"),
)

WITH_SCORES = (
    *("sentencepiece_bpe", "sentencepiece_nfkc", "sentencepiece_unigram", "mistral_v1"),
    "llama_like",
)
"""What llama.cpp's converter needs a SentencePiece model of."""


def export(folder: Path) -> tuple[ExportedTokenizer, Any]:
    """Export the student's tokenizer of a dataset; return also what transformers loads."""
    exported = export_tokenizer(open_dataset(folder), config=LLAMA)
    exported.write(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    return exported, AutoTokenizer.from_pretrained(folder / "model")


@pytest.mark.parametrize("name", STUDENTS)
def test_ids_and_special_tokens_are_the_datasets(name: str, tmp_path: Path) -> None:
    student = load(name)
    build_dataset(tmp_path, student=student)
    exported, loaded = export(tmp_path)
    texts = [text for _, text in make_texts(24)]
    batch = student.tokenize_batch([text.encode() for text in texts])
    before = [student.bos_token_id] if student.adds_bos else []
    for number, text in enumerate(texts):
        ids = batch.input_ids[batch.cu_tokens[number] : batch.cu_tokens[number + 1]].tolist()
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids
        assert loaded(text)["input_ids"][: len(before) + len(ids)] == [*before, *ids]
    assert exported.num_documents == 24
    assert ("tokenizer.model" in exported.files) == (name in WITH_SCORES)
    assert len(exported.differing_probes) <= 2
    assert loaded.bos_token_id == student.bos_token_id
    assert loaded.eos_token_id == loaded.pad_token_id == student.eos_token_id
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == student.eos_token_id
    if name in SPELLED:
        text = "The sum of 1..100 is  5050.\n\tA fair coin 🪙."
        assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text


def test_bos_is_what_texts_began_with_in_training(tmp_path: Path) -> None:
    """Not a BOS that the tokenizer names and puts nowhere: evaluations would begin with it."""
    manifest = build_dataset(tmp_path, student=byte_level(400))
    end = manifest.student.eos_token_id
    record = replace(manifest.student, convention=ConventionRecord(end, end, end))
    (tmp_path / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, student=record)))
    _, loaded = export(tmp_path)
    assert manifest.student.bos_token_id not in (None, end)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (end, end)


def test_runs_of_spaces_are_split_as_the_model_does(tmp_path: Path) -> None:
    # Mistral's pieces of spaces share one score, so that only their order tells which comes first.
    runs = [" " * size for size in range(1, 70)]
    texts = [(f"{n}", f"G1{run}G2[\n[{run}c") for n, run in enumerate(runs)]
    build_dataset(tmp_path, texts, student=load("mistral_v1"))
    assert export_tokenizer(open_dataset(tmp_path), config=LLAMA).num_documents == len(texts)


def test_texts_that_were_not_kept_are_spelled_by_their_tokens(tmp_path: Path) -> None:
    build_dataset(tmp_path, student=load("mistral_v1"), keep_text=False)
    assert export_tokenizer(open_dataset(tmp_path), config=LLAMA).num_documents == 24


def test_a_control_string_in_a_document_is_not_compared(tmp_path: Path) -> None:
    texts = [("forged", "one </s> two"), ("plain", "one two")]
    build_dataset(tmp_path, texts, student=load("mistral_v1"), num_shards=1)
    assert export_tokenizer(open_dataset(tmp_path), config=LLAMA).num_documents == 1


def test_another_tokenizer_than_the_datasets_is_refused(tmp_path: Path) -> None:
    manifest = build_dataset(tmp_path, student=byte_level(400))
    foreign = store_tokenizer(tmp_path, "student", byte_level(350))
    (tmp_path / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, student=foreign)))
    with pytest.raises(TokenizerError, match=r'different ids .* document "doc-0-\d+" of docs-0'):
        export_tokenizer(open_dataset(tmp_path), config=LLAMA)


def test_an_architecture_that_changes_a_tokenizer_gets_it_in_a_folder_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # transformers reads the tokenizer of a qwen2 model as Qwen2Tokenizer, whatever its file says.
    build_dataset(tmp_path, student=load("mistral_v1"))
    exported = export_tokenizer(open_dataset(tmp_path), config=LLAMA | {"model_type": "qwen2"})
    exported.write(tmp_path / "model")
    assert 'the folder "tokenizer" of the model' in caplog.text
    assert not (tmp_path / "model" / "tokenizer.json").exists()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model" / "tokenizer")
    assert exported.num_documents == 24
    text = make_texts(1)[0][1]
    ids = load("mistral_v1").tokenize_batch([text.encode()]).input_ids.tolist()
    assert loaded(text)["input_ids"] == [1, *ids]


def test_a_model_writes_with_it(tmp_path: Path) -> None:
    student = load("qwen_like")
    build_dataset(tmp_path / "data", student=student)
    folder = write_model(tmp_path / "model", student)
    (folder / student.file_name).unlink()
    config = json.loads((folder / "config.json").read_text())
    export_tokenizer(open_dataset(tmp_path / "data"), config=config).write(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = AutoTokenizer.from_pretrained(folder, padding_side="left")(
        ["The sum", "The sum of 1..100 is"], return_tensors="pt", padding=True
    )
    written = model.generate(**prompts, max_new_tokens=4, do_sample=False)
    assert written.shape[1] > prompts["input_ids"].shape[1]


@pytest.mark.parametrize(("bos", "before"), [("none", []), ("<unk>", [0])])
def test_what_rows_put_before_a_text_goes_before_a_prompt(
    bos: str, before: list[int], tmp_path: Path
) -> None:
    build_dataset(tmp_path, student=load("mistral_v1"))
    dataset = open_dataset(tmp_path)
    record = choose_conventions(dataset, student_bos=bos).student
    exported = export_tokenizer(dataset, config=LLAMA, record=record)
    exported.write(tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    bare = loaded("a", add_special_tokens=False)["input_ids"]
    assert loaded("a")["input_ids"] == [*before, *bare]


@pytest.mark.parametrize("before", [[], [0]])
def test_no_end_goes_behind_a_prompt(before: list[int], tmp_path: Path) -> None:
    """RoBERTa's and T5's own templates put one there; a model would begin another text."""
    body = json.loads(byte_level(400).file_bytes)
    names = token_names(body)
    body["post_processor"] = text_template(before, [1], names)
    own = load_tokenizer(str(write_definition(body, tmp_path)))
    assert own.adds_eos
    build_dataset(tmp_path / "data", student=own)
    export_tokenizer(open_dataset(tmp_path / "data"), config=LLAMA).write(tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    bare = loaded("a", add_special_tokens=False)["input_ids"]
    assert loaded("a")["input_ids"] == [*before, *bare]
    assert loaded.eos_token_id == own.eos_token_id == 1
