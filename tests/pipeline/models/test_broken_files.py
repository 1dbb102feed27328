"""A model's missing, cut or malformed file is named, instead of what transformers says of it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.command_line.git_lfs import PointerError
from pipeline.models.broken_files import require_plain
from pipeline.models.generation_defaults import read_generation_defaults
from pipeline.models.teacher_files import BrokenFileError
from pipeline.models.weights import load_weights, read_config
from tests.support.datasets import byte_level
from tests.support.hf_folders import make_llama, write_model

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 12345\n"
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


def pickled(change: Change, *, as_zip: bool = True) -> Change:
    def pickle(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        torch.save(weights, folder / PICKLE, _use_new_zipfile_serialization=as_zip)
        (folder / WEIGHTS).unlink()
        load_weights(folder, dtype="auto")
        change(folder)

    return pickle


def quantise_pickle(folder: Path) -> None:
    weights = torch.load(folder / PICKLE)
    name = "model.layers.0.mlp.down_proj.weight"
    torch.save(weights | {name: weights[name].to(torch.int8)}, folder / PICKLE)


def quantised(kind: torch.dtype, *, scales: bool = False) -> Change:
    """As they are published, without the configuration that says so."""

    def quantise(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        for name in [name for name in weights if name.endswith("proj.weight")]:
            scale = weights[name].abs().max() / 100
            weights[name] = (weights[name] / scale).to(kind)
            if scales:
                weights[f"{name}_scale_inv"] = scale.view(1, 1)
        save_file(weights, folder / WEIGHTS, {"format": "pt"})

    return quantise


def configured(**changes: object) -> Change:
    def configure(folder: Path) -> None:
        settings = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps(settings))

    return configure


def unread(kind: str, file: str = WEIGHTS) -> str:
    return (
        rf"{file}: model.layers.0.mlp.down_proj.weight holds {kind}, quantised numbers, and "
        r".*/config.json doesn't say how to read them \(quantization_config\): download"
    )


QUANTISED: dict[str, tuple[Change, str]] = {
    "int8": (quantised(torch.int8), unread("I8")),
    "int8 pickle": (pickled(quantise_pickle), unread("int8", PICKLE)),
    "fp8": (quantised(torch.float8_e4m3fn), unread("F8_E4M3")),
    "scales": (quantised(torch.float8_e4m3fn, scales=True), unread("F8_E4M3")),
    "no method": (
        configured(quantization_config={"bits": 4}),
        f'{CONFIG}: its quantization_config names no "quant_method": download it again, or take',
    ),
}
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
    **QUANTISED,
    "another kind": (
        holding(CONFIG, '{"model_type": "t5"}'),
        f'{CONFIG}: the model_type "t5" isn\'t that of a causal language model: name another',
    ),
    "no weights": (without(WEIGHTS), f"{WEIGHTS} doesn't exist: download all"),
    "cut weights": (cut(WEIGHTS), f"{WEIGHTS} {CUT}"),
    "empty weights": (holding(WEIGHTS, ""), f"{WEIGHTS} {CUT}"),
    "cut pickle": (pickled(cut(PICKLE)), f"{PICKLE} {CUT}"),
    "cut old pickle": (pickled(cut(PICKLE), as_zip=False), f"{PICKLE} {CUT}"),
    "page": (pickled(holding(PICKLE, "<html>")), f"{PICKLE} {CUT}"),
    "pointer": (pickled(holding(PICKLE, POINTER)), f"{PICKLE} is a Git LFS pointer to"),
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
    with pytest.raises((BrokenFileError, PointerError), match=f"^{tmp_path}/{message}"):
        load_weights(tmp_path, dtype="auto")
    if case in CONFIGURATIONS:
        with pytest.raises(BrokenFileError, match=f"^{tmp_path}/{message}"):
            read_config(tmp_path)


def test_plain_numbers_need_no_method_that_transformers_knows(tmp_path: Path) -> None:
    """And buffers of whole numbers, as old files hold, aren't weights."""
    folder = write_model(tmp_path, byte_level(400))
    configured(quantization_config={"quant_method": "own"})(folder)
    weights = load_file(folder / WEIGHTS) | {"position_ids": torch.arange(4)}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    require_plain(folder)
    configured(quantization_config={"quant_method": "fp8"})(folder)
    quantised(torch.float8_e4m3fn)(folder)
    require_plain(folder)


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


def test_a_pickle_too_large_for_the_memory_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 12 bytes: Cannot allocate memory (12)")

    pickled(lambda _: None)(write_model(tmp_path, byte_level(400)))
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(RuntimeError, match="Cannot allocate memory"):
        load_weights(tmp_path, dtype="auto")
