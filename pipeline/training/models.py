"""The models of a run: loaded, and refused where they don't belong to the data."""

import math
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.dataset.files import open_dataset
from pipeline.dataset.reading import read_manifest
from pipeline.guidance import aggregate_teacher_losses
from pipeline.scoring.hf_models import load_language_model, output_weight
from pipeline.scoring.packed_check import keep_documents_apart
from pipeline.scoring.teacher_files import find_teacher, require_tokenizer
from pipeline.streaming import AlignedRows, Rows
from pipeline.training.config import TrainConfig
from pipeline.training.losses import compute_teacher_losses
from pipeline.training.method import ONE_VOCABULARY
from schemas.errors import ForeignTokenizerError
from schemas.manifest import Manifest, TokenizerRecord

# An untrained model loses ln(vocabulary) or more.
_CHANCE_SHARE = 0.9


def load_student(config: TrainConfig, rows: AlignedRows, device: torch.device) -> PreTrainedModel:
    """Return the student, fp32; the same weights for the same seed.

    Raises:
        ForeignTokenizerError: it comes with another tokenizer than the data's.
        ValueError: its vocabulary or its length is too small for the data.
    """
    manifest, source = rows.manifest, config.student
    location = open_dataset(config.data).location
    if config.random_init:
        require_tokenizer(Path(source), location, manifest, side="student")
        torch.manual_seed(config.seed)
        shape = AutoConfig.from_pretrained(source)
        model = cast(Any, AutoModelForCausalLM).from_config(shape).float().to(device)
        output_weight(model)
        keep_documents_apart(model)
    else:
        files = find_teacher(source, role="student")
        files.require_tokenizer(location, manifest, side="student")
        model = load_language_model(str(files.path), device=str(device))
    _require_vocabulary(model, manifest.student, source, side="student")
    _require_length(model, config.seq_length, source, "--seq-length")
    return cast(PreTrainedModel, model)


def load_teacher(
    config: TrainConfig, rows: AlignedRows, device: torch.device
) -> PreTrainedModel | None:
    """Return the frozen teacher of a method that runs one, None for the others.

    Raises:
        ForeignTokenizerError: it comes with another tokenizer than the data's.
        ValueError: it can't have given losses for this data, or its weights did not load.
    """
    manifest, name = rows.manifest, config.method.name
    if not config.method.needs_teacher or config.stored_losses is not None:
        return None
    if name in ONE_VOCABULARY and manifest.student.sha256 != manifest.teacher.sha256:
        raise ValueError(
            f"--method {name} needs a teacher with the student's tokenizer, but {config.data} was "
            f"aligned with {manifest.teacher.source}: align with the student's as --teacher, too"
        )
    assert config.teacher is not None
    files = find_teacher(config.teacher)
    files.require_tokenizer(open_dataset(config.data).location, manifest)
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    teacher = load_language_model(str(files.path), dtype=dtype, device=str(device))
    _require_vocabulary(teacher, manifest.teacher, config.teacher, side="teacher")
    length = rows.plan.rules.teacher_seq_length
    _require_length(teacher, length, config.teacher, "--teacher-seq-length")
    teacher.requires_grad_(False)
    _require_trained(teacher, rows.__getitems__([0]).to(device), config.teacher)
    return teacher


def require_heldout(config: TrainConfig, manifest: Manifest) -> None:
    """Check that the held-out sets have the student tokens of the training data.

    Their teacher may be another one: bits per byte don't ask it.

    Raises:
        ForeignTokenizerError: one was made with another tokenizer.
    """
    for path in config.heldout_sets.values():
        own = read_manifest(path).student
        if own.sha256 != manifest.student.sha256:
            raise ForeignTokenizerError(
                f"--heldout {path} was made with student tokenizer {own.source} "
                f"({own.sha256[:16]}…), --data {config.data} with {manifest.student.source} "
                f"({manifest.student.sha256[:16]}…): align both with the same --student"
            )


def mean_teacher_loss(teacher: PreTrainedModel, batch: Rows) -> float:
    """Return the teacher's mean loss over the labels that it covers, nats; not over padding.

    A good model may find padding as unlikely as an untrained one finds everything.
    """
    guidance = aggregate_teacher_losses(
        compute_teacher_losses(teacher, batch),
        batch["teacher_spans"],
        "mean",
        teacher_loss_mask=batch.teacher_has_loss,
    )
    return float(guidance[batch["loss_mask"].bool()].nanmean())


def _require_vocabulary(
    model: PreTrainedModel, record: TokenizerRecord, source: str, *, side: str
) -> None:
    vocab_size = output_weight(model).shape[0]
    if record.vocab_size > vocab_size:
        raise ValueError(
            f"the data has {side} tokens up to {record.vocab_size - 1}, {source} knows "
            f"{vocab_size}: align with the tokenizer of this {side}"
        )


def _require_length(model: PreTrainedModel, length: int, source: str, option: str) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"{option}: rows have {length} tokens, {source} was made for {limit}: lower it"
        )


def _require_trained(teacher: PreTrainedModel, batch: Rows, source: str) -> None:
    mean, chance = mean_teacher_loss(teacher, batch), math.log(output_weight(teacher).shape[0])
    if not mean < _CHANCE_SHARE * chance:
        raise ValueError(
            f"{source} has a mean loss of {mean:.2f} nats, as if its weights had not been loaded "
            f"(chance is {chance:.2f}): check the file"
        )
