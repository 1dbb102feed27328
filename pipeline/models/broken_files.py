"""Name a model folder's missing, cut or malformed file: `transformers` has other words for it."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from pipeline.command_line.git_lfs import POINTER_BYTES, refuse_pointer
from pipeline.models.devices import lacks_memory
from pipeline.models.teacher_files import BrokenFileError, read_object

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_METHODS = ("quant_method", "load_in_8bit", "load_in_4bit")
_PLAIN = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
_PICKLES = "pytorch_model*.bin"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def require_configuration(folder: Path) -> dict[str, Any]:
    """Return a folder's configuration; BrokenFileError unless transformers has a class for it."""
    path = folder / "config.json"
    if not path.is_file():
        raise BrokenFileError(f"{path} doesn't exist: download all of the model's files")
    config = read_object(path)
    kind = config.get("model_type")
    if kind is None:
        raise BrokenFileError(f'{path} has no "model_type": download it again')
    if kind not in CONFIG_MAPPING and "auto_map" not in config:
        raise BrokenFileError(
            f"{path}: transformers {transformers.__version__} doesn't know the model_type "
            f"{json.dumps(kind)}: pip install -U transformers, or name another model"
        )
    return config


def require_plain(folder: Path) -> None:
    """Raise BrokenFileError for quantised numbers that no configuration says how to read.

    transformers would take them as they are. A quantization_config must name its method.
    """
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    texts = config.get("text_config")
    for found in (config, texts if isinstance(texts, dict) else {}):
        if (quantised := found.get("quantization_config")) is None:
            continue
        named = {n: quantised.get(n) for n in _METHODS} if isinstance(quantised, dict) else {}
        if not any(named.values()):
            raise BrokenFileError(
                f'{path}: its quantization_config names no "quant_method": download it again, or '
                "take quantization_config out of it if the weights are plain numbers"
            )
        if named.pop("quant_method") in AUTO_QUANTIZATION_CONFIG_MAPPING or any(named.values()):
            return
    for file in sorted(folder.glob("model*.safetensors")) or sorted(folder.glob(_PICKLES)):
        for name, kind in _kinds(file):
            is_weight = kind[0] in "Ff" or name.endswith(("weight", "_proj"))
            if is_weight and kind not in _PLAIN:
                raise BrokenFileError(
                    f"{file}: {name} holds {kind}, quantised numbers, and {path} doesn't say "
                    "how to read them (quantization_config): download the config.json that "
                    "belongs to them, or name the model in bfloat16 or float32"
                )


def require_whole(folder: Path) -> None:
    """Raise BrokenFileError unless a folder has all files of a causal language model, whole."""
    kind = require_configuration(folder)["model_type"]
    if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BrokenFileError(
            f"{folder}/config.json: the model_type {json.dumps(kind)} isn't that of a causal "
            "language model: name another model"
        )
    if (folder / "generation_config.json").is_file():
        read_object(folder / "generation_config.json")
    for index in (folder / name for name in _INDEXES if (folder / name).is_file()):
        _require_shards(index)
    files = sorted((*folder.glob("*.safetensors"), *folder.glob(_PICKLES)))
    if not any((folder / name).is_file() for name in (*_WEIGHTS, *_INDEXES)):
        lacking = _INDEXES[0] if any("-of-" in file.name for file in files) else _WEIGHTS[0]
        raise BrokenFileError(
            f"{folder / lacking} doesn't exist: download all of the model's files"
        )
    for file in files:
        with file.open("rb") as opened:
            refuse_pointer(str(file), opened.read(POINTER_BYTES))
        if damage := _damage(file):
            raise BrokenFileError(f"{file} is cut or damaged ({damage}): download it again")


def _require_shards(index: Path) -> None:
    parts = read_object(index)
    places = parts.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise BrokenFileError(f'{index} has no "weight_map": download it again')
    if "metadata" not in parts:
        raise BrokenFileError(f'{index} has no "metadata": download it again, or add {{}} as that')
    for shard in sorted({index.parent / str(name) for name in places.values()}):
        if not shard.is_file():
            raise BrokenFileError(f"{shard} doesn't exist, {index.name} names it: download it")


def _damage(file: Path) -> str:
    try:
        if file.suffix == ".safetensors":
            safe_open(file, "pt")
        else:
            _unpickle(file)
    except SafetensorError as error:
        return str(error)
    except Exception as error:  # torch's are of many types, with advice to run what the file says
        if lacks_memory(error):
            raise
        return f"{file.stat().st_size} bytes"
    return ""


def _kinds(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and dtypes of a file's tensors; none if it is damaged."""
    if file.suffix == ".safetensors":
        with suppress(SafetensorError), safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_slice(name).get_dtype()
        return
    weights: dict[str, Any] = {}
    with suppress(Exception):
        weights = _unpickle(file)
    for name, tensor in weights.items():
        if isinstance(tensor, torch.Tensor):
            yield name, str(tensor.dtype).removeprefix("torch.")


def _unpickle(file: Path) -> dict[str, Any]:
    # Files from before torch 1.6 aren't zip files, and can't be mapped.
    found: dict[str, Any] = torch.load(
        file, map_location="cpu", weights_only=True, mmap=is_zipfile(file)
    )
    return found
