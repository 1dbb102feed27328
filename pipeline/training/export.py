"""A student as a Hugging Face folder: weights, configuration, and the tokenizer of its data."""

import os
import shutil
from pathlib import Path

import fsspec
from transformers import PreTrainedModel

from pipeline.dataset_files import open_dataset
from pipeline.training.config import TrainConfig


def export_model(student: PreTrainedModel, config: TrainConfig, folder: Path) -> None:
    """Write a student with the tokenizer of its data; a folder that is there is replaced whole.

    Example:
        >>> export_model(student, config, config.output / "model")
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    student.save_pretrained(temporary)
    files = open_dataset(config.data)
    record = files.manifest.student
    with fsspec.open(f"{files.root}/{record.file}", "rb") as file:
        (temporary / Path(record.file).name).write_bytes(file.read())
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)
