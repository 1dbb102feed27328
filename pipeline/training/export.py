"""A student as a Hugging Face folder: weights, configuration, and the tokenizer of its data."""

import logging
import os
import shutil
from pathlib import Path

import fsspec
from transformers import PreTrainedModel

from pipeline.models.exported_tokenizer import export_tokenizer
from pipeline.streaming import AlignedRows
from pipeline.tokenization import TokenizerError
from pipeline.training.config import TrainConfig

logger = logging.getLogger(__name__)


def prove_tokenizer(
    config: TrainConfig, rows: AlignedRows, student: PreTrainedModel
) -> dict[str, bytes]:
    """Return the files of a tokenizer that `AutoTokenizer` loads and that gives the data's ids.

    Made before a run starts, so that nobody learns after it that there is none. Where transformers
    can't be brought to the dataset's ids, the dataset's own file is returned, with a warning.

    Example:
        >>> sorted(prove_tokenizer(config, rows, student))
        ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """
    dataset, record = rows.dataset, rows.manifest.student
    try:
        return dict(export_tokenizer(dataset, config=student.config.to_dict(), record=record).files)
    except TokenizerError as error:
        with fsspec.open(f"{dataset.location}/{record.file}", "rb") as file:
            data: bytes = file.read()
        name = Path(record.file).name
        logger.warning(
            "the trained models get the dataset's own %s, which vocag reads and transformers would "
            "read otherwise: %s",
            name,
            error,
        )
        return {name: data}


def export_model(student: PreTrainedModel, tokenizer: dict[str, bytes], folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; it is replaced whole.

    Args:
        student: its weights are written as they are.
        tokenizer: of `prove_tokenizer`.
        folder: to make.

    Example:
        >>> export_model(student, prove_tokenizer(config, rows, student), Path("model"))
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    student.save_pretrained(temporary)
    for name, data in tokenizer.items():
        (temporary / name).parent.mkdir(exist_ok=True)
        (temporary / name).write_bytes(data)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)
