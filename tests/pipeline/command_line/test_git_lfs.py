"""Git LFS pointers in the place of inputs, tokenizers, models and datasets."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from beam_jobs.align.command import align, describe
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.options import AlignOptions
from pipeline.command_line.failures import hints_of
from pipeline.command_line.git_lfs import POINTER_BYTES, PointerError, refuse_pointer
from pipeline.dataset.files import open_dataset
from pipeline.models.teacher_files import find_folder, find_teacher
from pipeline.tokenization.sources import find_tokenizer
from pipeline.validate.dataset_checks import validate_dataset
from tests.support.datasets import build_dataset

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 12345\n" % (b"0a" * 32)


def refused(read: Callable[[], object], path: Path) -> None:
    with pytest.raises(PointerError, match=re.escape(f"{path} is a Git LFS pointer to a file of")):
        read()


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.txt", "a.csv", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz", "a.xz"]
)
def test_an_input_file_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(POINTER)
    refused(lambda: find_inputs([str(path)], format="text" if name == "a.xz" else None), path)


def test_a_dry_run_and_a_job_refuse_alike_and_write_nothing(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(POINTER if name == "b.txt" else b"one document")
    options = AlignOptions((f"{tmp_path}/*.txt",), str(tmp_path / "out"), "bytes", "bytes")
    for command in (describe, align):
        refused(partial(command, options), tmp_path / "b.txt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tekken.json"])
def test_a_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    for source in (tmp_path, tmp_path / name):
        refused(partial(find_tokenizer, str(source)), tmp_path / name)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "pytorch_model.bin"])
def test_a_model_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(POINTER)
    (tmp_path / "picture.png").write_bytes(POINTER)  # nobody reads it
    refused(lambda: find_teacher(str(tmp_path)), tmp_path / name)
    if name != "pytorch_model.bin":
        refused(lambda: find_folder(str(tmp_path)), tmp_path / name)
    (tmp_path / "a.gguf").write_bytes(POINTER)
    refused(lambda: find_teacher(str(tmp_path / "a.gguf")), tmp_path / "a.gguf")


def test_a_dataset_is_refused_by_every_reader(tmp_path: Path) -> None:
    record = build_dataset(tmp_path).shards[1]
    dataset, index = open_dataset(tmp_path), tmp_path / record.index_file
    whole = index.read_bytes()
    index.write_bytes(POINTER)
    for read in (
        lambda: dataset.read_index(1),
        lambda: validate_dataset(str(tmp_path)),
        lambda: align(AlignOptions((str(tmp_path),), str(tmp_path.parent / "out"))),
    ):
        refused(read, index)
    index.write_bytes(whole)
    tar = tmp_path / record.file
    tar.write_bytes(POINTER)
    for read in (
        dataset.find_damage,
        lambda: dataset.open_shard(1),
        lambda: validate_dataset(str(tmp_path)),
        lambda: align(AlignOptions((str(tmp_path),), str(tmp_path.parent / "out"))),
    ):
        refused(read, tar)
    (tmp_path / "manifest.json").write_bytes(POINTER)
    refused(lambda: open_dataset(tmp_path), tmp_path / "manifest.json")


def test_the_remedy_can_be_pasted() -> None:
    with pytest.raises(PointerError) as caught:
        refuse_pointer("/data/a b/x.parquet", POINTER)
    assert hints_of(caught.value) == ["hint: git -C '/data/a b' lfs pull"]
    for path in ("x.parquet", "gs://bucket/x.parquet"):
        with pytest.raises(PointerError) as caught:
            refuse_pointer(path, POINTER)
        assert hints_of(caught.value) == ["hint: git lfs pull"]


def test_what_only_resembles_one_is_read() -> None:
    for text in (
        POINTER + b"and a document about it\n",
        b"see " + POINTER,
        POINTER.replace(b"size 12345\n", b""),
        POINTER + b"\n" * POINTER_BYTES,
        b"",
    ):
        refuse_pointer("a.txt", text)
