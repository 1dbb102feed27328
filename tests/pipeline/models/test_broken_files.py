"""A model's missing, cut or malformed file is named, instead of what transformers says of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.models.generation_defaults import read_generation_defaults
from pipeline.models.teacher_files import BrokenFileError
from pipeline.models.weights import load_weights, read_config
from tests.support.datasets import byte_level
from tests.support.hf_folders import make_llama, write_model

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CUT = r"is cut or damaged \(.*\): download it again"

Change = Callable[[Path], object]


def holding(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def encoded(name: str, encoding: str) -> Change:
    return lambda folder: (folder / name).write_text((folder / name).read_text(), encoding)


def cut(name: str) -> Change:
    def halve(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return halve


def cut_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    load_weights(folder, dtype="auto")
    cut("pytorch_model.bin")(folder)


CONFIGURATIONS: dict[str, tuple[Change, str]] = {
    "no config": (without(CONFIG), f"{CONFIG} doesn't exist: download all"),
    "cut config": (cut(CONFIG), rf"{CONFIG} isn't JSON \(.*\): download it again"),
    "deep config": (holding(CONFIG, "[" * 100_000), rf"{CONFIG} isn't JSON \(maximum recursion"),
    "marked": (encoded(CONFIG, "utf-8-sig"), f"{CONFIG} isn't plain UTF-8: save it so, without"),
    "wide": (encoded(CONFIG, "utf-16"), f"{CONFIG} isn't plain UTF-8: save it so, without"),
    "list": (holding(CONFIG, "[]"), f"{CONFIG} holds no JSON object: download it again"),
    "no type": (holding(CONFIG, "{}"), f'{CONFIG} has no "model_type": download it again'),
    "unknown type": (
        holding(CONFIG, '{"model_type": "llamaa"}'),
        f'{CONFIG}: transformers 5.* doesn\'t know the model_type "llamaa": pip install -U',
    ),
}
WHOLE: dict[str, tuple[Change, str]] = {
    **CONFIGURATIONS,
    "another kind": (
        holding(CONFIG, '{"model_type": "t5"}'),
        f'{CONFIG}: the model_type "t5" isn\'t that of a causal language model: name another',
    ),
    "no weights": (without(WEIGHTS), f"{WEIGHTS} doesn't exist: download all"),
    "cut weights": (cut(WEIGHTS), f"{WEIGHTS} {CUT}"),
    "empty weights": (holding(WEIGHTS, ""), f"{WEIGHTS} {CUT}"),
    "cut pickle": (cut_pickle, f"pytorch_model.bin {CUT}"),
    "generation": (
        holding("generation_config.json", "[1]"),
        "generation_config.json holds no JSON",
    ),
}
SHARD = "model-00002-of-00002.safetensors"
SHARDED: dict[str, tuple[Change, str]] = {
    "no index": (without(INDEX), f"{INDEX} doesn't exist: download all"),
    "cut index": (cut(INDEX), f"{INDEX} isn't JSON"),
    "marked index": (holding(INDEX, "\ufeff{}"), f"{INDEX} isn't plain UTF-8: save it so"),
    "empty index": (holding(INDEX, "{}"), f'{INDEX} has no "weight_map": download it again'),
    "empty map": (
        holding(INDEX, '{"metadata": {}, "weight_map": {}}'),
        f'{INDEX} has no "weight_map"',
    ),
    "no metadata": (
        holding(INDEX, f'{{"weight_map": {{"a": "{SHARD}"}}}}'),
        f'{INDEX} has no "metadata": download it again, or add {{}} as that',
    ),
    "no shard": (without(SHARD), f"{SHARD} doesn't exist, {INDEX} names it: download it"),
    "cut shard": (cut(SHARD), f"{SHARD} {CUT}"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_broken_file_is_named(case: str, tmp_path: Path) -> None:
    change, message = WHOLE[case]
    change(write_model(tmp_path, byte_level(400)))
    with pytest.raises(BrokenFileError, match=f"^{tmp_path}/{message}"):
        load_weights(tmp_path, dtype="auto")
    if case in CONFIGURATIONS:
        with pytest.raises(BrokenFileError, match=f"^{tmp_path}/{message}"):
            read_config(tmp_path)


@pytest.mark.parametrize("case", SHARDED)
def test_a_broken_file_of_a_sharded_model_is_named(case: str, tmp_path: Path) -> None:
    change, message = SHARDED[case]
    make_llama(400).save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / SHARD).is_file()
    change(tmp_path)
    with pytest.raises(BrokenFileError, match=f"^{tmp_path}/{message}"):
        load_weights(tmp_path, dtype="auto")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_broken_defaults_are_named(name: str, tmp_path: Path) -> None:
    holding(name, "{")(write_model(tmp_path, byte_level(400)))
    with pytest.raises(BrokenFileError, match=rf"^{tmp_path}/{name} isn't JSON \(.*\): download"):
        read_generation_defaults(str(tmp_path))
