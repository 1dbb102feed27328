"""A student as a Hugging Face folder, with the tokenizer of its data."""

import logging
from pathlib import Path

import fsspec
from transformers import PreTrainedModel

from pipeline.models.exported_tokenizer import ExportedTokenizer, export_tokenizer, save_model
from pipeline.models.generation_defaults import GENERATION_FILE, read_generation_defaults
from pipeline.streaming import AlignedRows
from pipeline.tokenization import TokenizerError
from pipeline.training.disk import replacing

logger = logging.getLogger(__name__)


def prove_tokenizer(rows: AlignedRows, student: PreTrainedModel) -> ExportedTokenizer:
    """Return the tokenizer of a run's data for `AutoTokenizer`, with generation defaults.

    Chat template, ends and sampling come from the student's folder. If transformers can't reproduce
    the dataset's ids, it is the dataset's own file, with a warning.

    Example:
        >>> sorted(prove_tokenizer(rows, student).files)  # doctest: +SKIP
        ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """
    dataset, record = rows.dataset, rows.manifest.student
    config = student.config.to_dict()
    defaults = read_generation_defaults(str(student.config.name_or_path))
    try:
        return export_tokenizer(dataset, config=config, record=record, defaults=defaults)
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
        generation = student.generation_config.to_json_string(use_diff=True)
        return ExportedTokenizer({name: data, GENERATION_FILE: generation.encode()})


def export_model(student: PreTrainedModel, tokenizer: ExportedTokenizer, folder: Path) -> None:
    """Replace a folder by one that transformers loads; DiskFullError if it doesn't fit."""
    with replacing(folder, sum(weight.nbytes for weight in student.parameters())) as temporary:
        save_model(student, tokenizer, temporary)
