"""Weights of Hugging Face folders and repositories, and Megatron checkpoints."""

import json
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_plugin.models.shape import ModelShape, read_shape, shape_of_config
from megatron_plugin.models.weight_rules import merge_weights, tensors_of
from pipeline.command_line.failures import hinted
from pipeline.command_line.nearest import look_near
from pipeline.models.broken_files import require_plain
from pipeline.models.teacher_files import TeacherFiles, find_teacher
from pipeline.models.weights import require_fit

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_PER_LAYER = "decoder.layers."
_COMPUTED = "rotary_emb.inv_freq"  # in old files
TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Beside a run's checkpoints, which iteration's is the newest."""


class WeightsError(ValueError):
    """A model's weights are missing, incomplete or in an unknown format."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file; indexing reads only the slice."""

    path: Path
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dimensions."""
        with _named(self.path), safe_open(self.path, framework="pt") as file:
            return tuple(file.get_slice(self.name).get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        with _named(self.path), safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_slice(self.name)[index]
            return tensor


@dataclass(frozen=True)
class Weights:
    """A model on disk; `tensors` maps Hugging Face names to files."""

    files: TeacherFiles
    shape: ModelShape
    tensors: Mapping[str, Path]

    def open(self, name: str) -> StoredTensor:
        """Return a tensor to slice, which raises WeightsError for a damaged file."""
        return StoredTensor(self.tensors[name], name)


def open_weights(source: str) -> Weights:
    """Find a model, as `find_teacher` does, with safetensors in one file or several.

    WeightsError without usable weights, BrokenFileError for quantised numbers,
    UnfittingWeightsError if they don't fit the configuration, UnsupportedModelError for an
    untranslated one.
    """
    files = find_teacher(source, role="model")
    folder, single = files.path, files.path / _SINGLE_FILE
    if (folder / _INDEX_FILE).is_file():
        names: dict[str, str] = json.loads((folder / _INDEX_FILE).read_bytes())["weight_map"]
        tensors = {name: folder / file for name, file in names.items()}
    elif single.is_file():
        with _named(single), safe_open(single, framework="pt") as file:
            tensors = dict.fromkeys(file.keys(), single)
    else:
        raise WeightsError(
            f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}: other formats aren't read; "
            "load the model with transformers and save_pretrained it"
        )
    known = set(tensors.values())
    missing = sorted(path.name for path in known if not path.is_file())
    if missing:
        raise WeightsError(
            f"{folder} lacks {len(missing)} of the {len(known)} files that {_INDEX_FILE} names, "
            f"{missing[0]} first: download it again"
        )
    shape = read_shape(folder)
    require_plain(folder)
    _require_fit(str(folder), shape, _shapes(tensors))
    return Weights(files, shape, tensors)


def read_student(folder: Path) -> tuple[ModelShape, dict[str, Tensor]]:
    """Return a distributed checkpoint's model, by Hugging Face name, from any parallelism.

    WeightsError for another checkpoint or an unknown model, UnfittingWeightsError for missing
    weights.
    """
    folder = newest_iteration(folder)
    require_whole(folder)
    config = getattr(checkpoint_args(folder), "vocag_model_config", None)
    if config is None:
        raise WeightsError(
            f"{folder} was not saved by megatron_plugin.pretrain_gpt (no vocag_model_config), or "
            "its student's family isn't supported, so its architecture isn't known"
        )
    shape = shape_of_config(config)
    slices = {name: [tensor] for name, tensor in _whole_parameters(folder).items()}
    merged = merge_weights(slices, shape)
    _require_fit(str(folder), shape, {name: tuple(own.shape) for name, own in merged.items()})
    return shape, merged


def newest_iteration(folder: Path) -> Path:
    """Return the newest iteration's folder of a `--save` folder, or an iteration's own.

    WeightsError without any.
    """
    if (folder / ".metadata").is_file():
        return folder
    tracker = folder / TRACKER_FILE
    if not tracker.is_file():
        error = WeightsError(
            f"{folder} holds no Megatron checkpoint (no {TRACKER_FILE}): name a run's --save folder"
        )
        raise hinted(error, look_near(str(folder)))
    named = tracker.read_text("utf-8").strip()
    if not named.isdecimal():
        error = WeightsError(
            f"{tracker} says {named!r}, not an iteration: no run of this trainer saved it. Add "
            "--finetune to start a new run from its weights"
        )
        raise hinted(error, "--finetune")
    newest = folder / f"iter_{int(named):07d}"
    if not (newest / ".metadata").is_file():
        raise WeightsError(
            f"{newest}, which {tracker} names, isn't a whole distributed checkpoint (no "
            f".metadata): {_instead(newest)}"
        )
    return newest


def require_whole(folder: Path) -> None:
    """Raise WeightsError if an iteration lacks recorded bytes."""
    with _undamaged(folder, ".metadata"):
        stored = FileSystemReader(folder).read_metadata().storage_data
    ends: dict[str, int] = {}
    for entry in stored.values():
        end = entry.offset + entry.length
        ends[entry.relative_path] = max(end, ends.get(entry.relative_path, 0))
    for name, end in sorted(ends.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size < end:
            raise WeightsError(
                f"{path} has {size} bytes of at least {end}, so the checkpoint is damaged: "
                f"{_instead(folder)}"
            )


def _instead(folder: Path) -> str:
    others = [path.parent for path in folder.parent.glob("iter_*/.metadata")]
    numbers = sorted(int(path.name.removeprefix("iter_")) for path in others if path != folder)
    if not numbers:
        return "copy it again; there is no other iteration to go back to"
    return (
        f"copy it again, or go back: write the number of another iteration into "
        f"{folder.parent / TRACKER_FILE} (there are {', '.join(map(str, numbers))})"
    )


@contextmanager
def _undamaged(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    # Damaged pickles may raise anything; torch's wrapper isn't an Exception.
    except (Exception, CheckpointException) as error:
        raise WeightsError(
            f"{folder} is damaged: {what} can't be read ({error!r}): {_instead(folder)}"
        ) from error


def checkpoint_args(folder: Path) -> Namespace:
    """Return the arguments of the run that saved an iteration."""
    with _one_process():
        from megatron_plugin.upstream import load_common_state_dict

        with _undamaged(folder, "what its run was started with"):
            args: Namespace = load_common_state_dict(folder)["args"]
        return args


@contextmanager
def _one_process() -> Iterator[None]:
    """Silence warnings that don't concern a reader of checkpoints."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        # From Megatron's import.
        warnings.filterwarnings("ignore", ".*Transformer Engine and Apex")
        yield


def _require_fit(where: str, shape: ModelShape, found: Mapping[str, tuple[int, ...]]) -> None:
    expected = tensors_of(shape)
    if shape.tied_embeddings and "lm_head.weight" in found:  # its second copy
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    computed = {name for name in found if name.endswith(_COMPUTED)}
    require_fit(
        where,
        missing=expected.keys() - found.keys(),
        unexpected=found.keys() - expected.keys() - computed,
        mismatched=[
            (name, found[name], expected[name])
            for name in expected.keys() & found.keys()
            if found[name] != expected[name]
        ],
    )


def _shapes(tensors: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted({*tensors.values()}):
        with _named(path), safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return found


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise WeightsError(
            f"{path} ({path.stat().st_size} bytes) is cut or damaged: {error}; download it again"
        ) from error


def _whole_parameters(folder: Path) -> dict[str, Tensor]:
    """Read parameters by name; Megatron stores all layers' as one tensor."""
    saved: Mapping[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
        and name.startswith(("embedding.", "decoder.", "output_layer."))
    }
    with _one_process():
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    whole = {}
    for name, tensor in wanted.items():
        if not name.startswith(_PER_LAYER):
            whole[name] = tensor
            continue
        for layer, parameter in enumerate(tensor):
            whole[f"{_PER_LAYER}{layer}.{name.removeprefix(_PER_LAYER)}"] = parameter
    return whole
