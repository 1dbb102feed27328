"""A teacher's files: what decides its losses is hashed, and its tokens must be the dataset's."""

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from packaged_model import find_gguf

from pipeline.command_line.failures import hints_of
from pipeline.dataset.files import Dataset
from pipeline.models.fit import require_tokenizer
from pipeline.models.teacher_files import find_folder, find_teacher
from pipeline.tokenization import load_tokenizer
from pipeline.tokenization.conversion import convert_sentencepiece, read_sentencepiece_model
from schemas.errors import ForeignTokenizerError
from tests.support.datasets import build_dataset, byte_level
from tests.support.hf_folders import write_model
from tests.support.tokenizer_zoo import MISTRAL_DATA


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return write_model(tmp_path / "teacher", byte_level(480))


def test_weights_and_configuration_decide_the_hash_and_nothing_else(
    teacher: Path, tmp_path: Path
) -> None:
    before = find_teacher(str(teacher)).sha256
    files = [teacher / name for name in ("config.json", "model.safetensors")]
    content = [[file.name, sha256(file.read_bytes()).hexdigest()] for file in files]
    assert before == sha256(json.dumps(content).encode()).hexdigest()
    shutil.copytree(teacher, tmp_path / "elsewhere")
    assert find_teacher(str(tmp_path / "elsewhere")).sha256 == before
    (teacher / "README.md").write_text("a note")
    assert find_teacher(str(teacher)).sha256 == before
    for name in ("config.json", "model.safetensors"):
        file = tmp_path / "elsewhere" / name
        whole = file.read_bytes()
        file.write_bytes(whole + b" ")
        assert find_teacher(str(tmp_path / "elsewhere")).sha256 != before
        file.write_bytes(whole)
    (tmp_path / "elsewhere" / "model.safetensors").rename(
        tmp_path / "elsewhere" / "model-00001-of-00002.safetensors"
    )
    assert find_teacher(str(tmp_path / "elsewhere")).sha256 != before


def test_weights_in_a_pickle_decide_the_hash_next_to_other_tensors(teacher: Path) -> None:
    """transformers reads the pickle then; only the others were hashed."""
    (teacher / "model.safetensors").rename(teacher / "consolidated.safetensors")
    (teacher / "pytorch_model.bin").write_bytes(b"one")
    before = find_teacher(str(teacher)).sha256
    (teacher / "pytorch_model.bin").write_bytes(b"two")
    assert find_teacher(str(teacher)).sha256 != before
    (teacher / "consolidated.safetensors").rename(teacher / "model.safetensors")
    before = find_teacher(str(teacher)).sha256
    (teacher / "pytorch_model.bin").unlink()
    assert find_teacher(str(teacher)).sha256 == before


def test_a_file_where_a_folder_is_asked_for_is_called_one(tmp_path: Path) -> None:
    """It was "no such folder or .gguf file" of a .gguf file, which vocag transfer can't take."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r'model ".*x\.gguf" is a file: name a folder in the'):
        find_folder(str(tmp_path / "x.gguf"), role="model")


@pytest.mark.parametrize("source", ["owner/name", "owner/name@main", "owner/name@refs/pr/1"])
def test_a_repository_may_have_a_revision(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    place = "pipeline.models.teacher_files.download_folder"

    def download(name: str, _: object) -> Path:
        asked.append(name)
        return Path()

    monkeypatch.setattr(place, download)
    find_folder(source)
    assert asked == [source]
    for other in ("gpt2", "./a/b", "~/a", "~nobody-of-that-name/a", "a/b/c", "/a", "a b/c"):
        with pytest.raises(ValueError, match="not a Hugging Face repository name"):
            find_folder(other)


def test_a_folder_s_tokenizer_must_be_the_dataset_s(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = build_dataset(tmp_path / "data")
    data = Dataset(str(tmp_path / "data"), manifest)
    require_tokenizer(teacher, data, side="teacher")
    (teacher / "tokenizer.json").write_bytes(byte_level(400).file_bytes)
    with pytest.raises(ForeignTokenizerError, match=r"made with \"tests/teacher\"") as refused:
        require_tokenizer(teacher, data, side="teacher")
    again = f"vocag align --input {data.location} --teacher {teacher} --output {data.location}-2"
    assert hints_of(refused.value) == [f"hint: teacher=tests/teacher  # or {again}"]
    elsewhere = replace(manifest.teacher, source="../no such folder/teacher")
    data = Dataset(data.location, replace(manifest, teacher=elsewhere))
    with pytest.raises(ForeignTokenizerError) as refused:
        require_tokenizer(teacher, data, side="teacher")
    assert hints_of(refused.value) == [f"hint: {again}"]
    # A name as it was given elsewhere: here it leads to another tokenizer's folder, or to its own.
    monkeypatch.chdir(tmp_path)
    named = replace(manifest, teacher=replace(manifest.teacher, source="own/teacher"))
    for file_bytes, hint in (
        (byte_level(420).file_bytes, again),
        (
            Path(data.location, manifest.teacher.file).read_bytes(),
            f"teacher=own/teacher  # or {again}",
        ),
    ):
        Path("own/teacher").mkdir(parents=True, exist_ok=True)
        Path("own/teacher/tokenizer.json").write_bytes(file_bytes)
        with pytest.raises(ForeignTokenizerError) as refused:
            require_tokenizer(teacher, Dataset(data.location, named), side="teacher")
        assert hints_of(refused.value) == [f"hint: {hint}"]
    # The hub's for a tokenizer, and no model's that we would take.
    data = Dataset(data.location, replace(manifest, teacher=replace(manifest.teacher, source="x")))
    with pytest.raises(ForeignTokenizerError) as refused:
        require_tokenizer(teacher, data, side="teacher")
    assert hints_of(refused.value) == [f"hint: {again}"]
    (teacher / "tokenizer.json").unlink()  # taken at its word
    require_tokenizer(teacher, data, side="teacher")


def test_a_gguf_file_s_vocabulary_must_be_the_dataset_s(tmp_path: Path) -> None:
    file = find_gguf()
    if file is None:
        pytest.skip("make test installs the model")
    teacher = find_teacher(str(file))
    assert teacher.files == (file,)
    assert len(teacher.sha256) == 64
    manifest = build_dataset(tmp_path / "data")
    with pytest.raises(ForeignTokenizerError, match=r"token \d+ is '.*' in the dataset's teacher"):
        require_tokenizer(file, Dataset(str(tmp_path / "data"), manifest), side="teacher")


def test_a_folder_s_tokenizer_of_another_kind_means_the_same_by_most_ids(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = build_dataset(tmp_path / "data")
    record = replace(manifest.teacher, file="teacher/tokenizer.model")
    data = Dataset(str(tmp_path / "data"), replace(manifest, teacher=record))
    own = load_tokenizer(str(MISTRAL_DATA / "tokenizer.model.v1"), fast=False)
    monkeypatch.setattr("pipeline.models.fit.load_dataset_tokenizer", lambda *_: own)
    (teacher / "tokenizer.json").write_bytes(byte_level(400).file_bytes)
    with pytest.raises(ForeignTokenizerError, match=r"made with \"tests/teacher\""):
        require_tokenizer(teacher, data, side="teacher")
    converted = convert_sentencepiece(own.file_bytes, source="mistral")
    (teacher / "tokenizer.json").write_text(json.dumps(converted), "utf-8")
    require_tokenizer(teacher, data, side="teacher")


def test_a_gguf_file_s_vocabulary_is_compared_with_a_sentencepiece_model_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf", reason="needs vocag[packaged-teacher]")
    dataset = Dataset(str(tmp_path / "data"), build_dataset(tmp_path / "data"))
    own = load_tokenizer(str(MISTRAL_DATA / "tokenizer.model.v1"), fast=False)
    monkeypatch.setattr("pipeline.models.fit.load_dataset_tokenizer", lambda *_: own)
    pieces = [piece.text for piece in read_sentencepiece_model(own.file_bytes).pieces]
    for name, tokens in (("own", ["[PAD]", *pieces[1:]]), ("other", pieces[::-1])):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        writer.add_token_list(tokens)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    require_tokenizer(tmp_path / "own.gguf", dataset, side="teacher")
    with pytest.raises(ForeignTokenizerError, match="token 0 is '<unk>' in the dataset's teacher"):
        require_tokenizer(tmp_path / "other.gguf", dataset, side="teacher")
