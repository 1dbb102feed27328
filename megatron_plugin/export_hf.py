"""Export trained students as Hugging Face folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_plugin.models.shape import ModelShape
from megatron_plugin.models.weight_sources import checkpoint_args, newest_iteration, read_student
from pipeline.command_line.failures import hinted
from pipeline.command_line.pasted import pasted
from pipeline.models.exported_tokenizer import ExportedTokenizer, export_tokenizer, share_weights
from pipeline.models.generation_defaults import read_generation_defaults
from pipeline.packing.opening import open_run
from pipeline.packing.reading import Reading
from pipeline.training.disk import replacing
from schemas.errors import DatasetError


def export_student(
    checkpoint: Path, output: Path, *, dtype: torch.dtype | None = None, with_tokenizer: bool = True
) -> ModelShape:
    """Write a checkpoint's student as a Hugging Face folder; return its shape.

    The checkpoint, of any parallelism, is a run's `--save` folder (its newest iteration) or one
    iteration's; the output must not hold a model. `dtype` None keeps the checkpoint's. The
    tokenizer comes from the training dataset, complete for `AutoTokenizer` and checked on its
    texts.

    Raises:
        WeightsError: no checkpoint of this trainer.
        FileExistsError: the folder holds a model.
        DatasetError: the run's dataset is gone.
        TokenizerError: transformers would split the dataset's texts differently.
    """
    if (output / "config.json").exists():
        error = FileExistsError(f"{output} holds a model already: name another folder or remove it")
        raise hinted(error, f"vocag export {pasted(str(checkpoint))} {pasted(f'{output}-2')}")
    shape, read = read_student(checkpoint)
    tensors = {name: tensor.to(dtype or tensor.dtype).clone() for name, tensor in read.items()}
    config = shape.config | {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape.family]],
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
    }
    # First, because it may be refused.
    tokenizer = _tokenizer(checkpoint, config) if with_tokenizer else None
    output.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, output, max_shard_size="4GB")
    if tokenizer is not None:
        tokenizer.write(output)
        config |= tokenizer.token_ids
        print(tokenizer)
    # Last, because it makes the folder a model.
    data = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    with replacing(output / "config.json", len(data)) as whole:
        whole.write_bytes(data)
    share_weights(output)
    return shape


def _tokenizer(checkpoint: Path, config: Mapping[str, Any]) -> ExportedTokenizer:
    args = checkpoint_args(newest_iteration(checkpoint))
    reading = Reading(
        args.vocag_data,
        student_bos=getattr(args, "vocag_student_bos", None),
        student_eos=getattr(args, "vocag_student_eos", None),
    )
    try:
        opened = open_run(reading)
    except DatasetError as error:
        raise DatasetError(
            f"the run's dataset {reading.path} can't be read, so its tokenizer can't either "
            f"({error}): bring it back, or pass --no-tokenizer"
        ) from error
    return export_tokenizer(
        opened.dataset,
        config=config,
        record=opened.manifest.student,
        defaults=read_generation_defaults(getattr(args, "vocag_student", None) or ""),
    )
