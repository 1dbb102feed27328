"""Export a trained student as a Hugging Face folder, to evaluate and to serve.

    python -m megatron_plugin.export_hf CHECKPOINT OUT

Reads a checkpoint of `megatron_plugin.pretrain_gpt`, whatever parallelism saved it, on one CPU
process. The tokenizer comes along from the dataset that the student was trained on, complete for
`AutoTokenizer` and proven to give the dataset's ids.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_plugin.arguments import Dtype
from megatron_plugin.models.weights import (
    Weights,
    checkpoint_args,
    newest_iteration,
    open_megatron_checkpoint,
)
from pipeline.models.exported_tokenizer import ExportedTokenizer, export_tokenizer
from pipeline.packing.opening import open_run
from pipeline.packing.reading import Reading
from schemas.errors import DatasetError
from vocag_cli.options import Option, parse_options

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FILE_BYTES = 4 << 30


@dataclass(frozen=True)
class ExportOptions:
    """Export a trained student as a Hugging Face folder.

    Attributes:
        checkpoint: --save folder, or one iteration's folder.
        output: folder to make.
        dtype: of the exported weights (default: as in the checkpoint).
        no_tokenizer: leave the dataset's tokenizer out.
    """

    checkpoint: Annotated[Path, Option("CHECKPOINT", form="positional")]
    output: Annotated[Path, Option("FOLDER", form="positional")]
    dtype: Dtype | None = None
    no_tokenizer: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Export one checkpoint; return the exit code."""
    options = parse_options(ExportOptions, argv, prog="vocag export")
    try:
        weights = export_student(
            options.checkpoint,
            options.output,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            with_tokenizer=not options.no_tokenizer,
        )
    except (ValueError, OSError, SafetensorError) as error:
        print(f"export_hf: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {len(weights.tensors)} tensors, {weights.shape.family}")
    return 0


def export_student(
    checkpoint: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    with_tokenizer: bool = True,
) -> Weights:
    """Write a checkpoint's student in Hugging Face's format.

    Args:
        checkpoint: a run's `--save` folder (its newest iteration) or one iteration's folder.
        output: folder to make; must not hold a model yet.
        dtype: of the tensors; None: as in the checkpoint.
        with_tokenizer: bring the student's tokenizer from the run's dataset, proven on its texts.

    Returns:
        What was exported.

    Raises:
        WeightsError: no checkpoint of this trainer.
        FileExistsError: the folder holds a model.
        DatasetError: the run's dataset isn't there any more.
        TokenizerError: transformers would split the dataset's texts otherwise.

    Example:
        >>> export_student(Path("checkpoints"), Path("student")).shape.family
        'llama'
    """
    if (output / "config.json").exists():
        raise FileExistsError(f"{output} holds a model already: name another folder or remove it")
    weights = open_megatron_checkpoint(checkpoint)
    tensors = {
        name: tensor.to(dtype or tensor.dtype).clone()
        for name, tensor in weights.tensors.items()
        if isinstance(tensor, Tensor)
    }
    config = exported_config(weights, next(iter(tensors.values())).dtype)
    # First, because it may be refused.
    tokenizer = _tokenizer(checkpoint, config) if with_tokenizer else None
    output.mkdir(parents=True, exist_ok=True)
    _write_tensors(tensors, output)
    if tokenizer is not None:
        tokenizer.write(output)
        print(tokenizer)
    # Last, because it makes the folder a model.
    (output / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return weights


def exported_config(weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
    """Return the `config.json` of an exported model."""
    family = weights.shape.family
    return weights.shape.config | {
        "architectures": [_ARCHITECTURES[family]],
        "dtype": str(dtype).removeprefix("torch."),
    }


def _tokenizer(checkpoint: Path, config: Mapping[str, Any]) -> ExportedTokenizer:
    """Make and prove the tokenizer of a run's dataset.

    Raises:
        DatasetError: the dataset isn't there.
        TokenizerError: it gives other ids in transformers.
    """
    args = checkpoint_args(newest_iteration(checkpoint))
    data = args.vocag_data
    try:
        opened = open_run(
            Reading(
                path=data,
                student_bos=getattr(args, "vocag_student_bos", None),
                student_eos=getattr(args, "vocag_student_eos", None),
            )
        )
    except DatasetError as error:
        raise DatasetError(
            f"the run's dataset {data} can't be read, so its tokenizer can't either ({error}): "
            "bring it back, or pass --no-tokenizer"
        ) from error
    return export_tokenizer(opened.dataset, config=config, record=opened.manifest.student)


def _write_tensors(tensors: Mapping[str, Tensor], output: Path) -> None:
    """Write files of at most 4 GiB, with an index if there are several."""
    files: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, tensor in tensors.items():
        if num_bytes + tensor.nbytes > _FILE_BYTES and files[-1]:
            files.append({})
            num_bytes = 0
        files[-1][name] = tensor
        num_bytes += tensor.nbytes
    if len(files) == 1:
        save_file(files[0], output / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(part, output / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
