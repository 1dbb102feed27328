"""Load models for a run's rows, if they fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from pipeline.dataset.tokenizers import Side
from pipeline.models.fit import require_room, require_tokenizer, short_length
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import output_layer, require_own_losses
from pipeline.models.packed_check import keep_documents_apart
from pipeline.models.probe import require_trained
from pipeline.models.teacher_files import find_folder, find_teacher
from pipeline.packing.opening import OpenedRun
from pipeline.packing.rules import PackingRules


def open_model(
    source: str | PreTrainedModel,
    opened: OpenedRun,
    rules: PackingRules,
    *,
    side: Side,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
) -> PreTrainedModel:
    """Return a model that belongs to a run's rows, loaded if it is named as in `find_teacher`.

    ForeignTokenizerError for a different tokenizer; ValueError for too small a vocabulary or
    length, unknown logits, or leaking documents.
    """
    folder = _folder_of(source, side)
    if folder is not None:
        require_tokenizer(folder, opened.dataset, side=side)
    if isinstance(source, str):
        model = load_language_model(str(folder), dtype=dtype, device=str(device), packed=False)
    else:
        model = cast(Any, source).to(device)
        require_own_losses(model)
    keep_documents_apart(model, packed=not rules.one_document_a_row)
    name = source if isinstance(source, str) else name_of(source)
    require_model_room(model, opened, rules, name, side=side)
    return model


def name_of(model: PreTrainedModel) -> str:
    """Return a model's source, for messages."""
    return str(model.config.name_or_path) or "the model"


def _folder_of(source: str | PreTrainedModel, side: Side) -> Path | None:
    if isinstance(source, str):
        return find_teacher(source, role=side).path
    name = str(source.config.name_or_path)
    if name.endswith(".gguf"):
        return find_teacher(name, role=side).path
    return find_folder(name, role=side) if name else None


def open_running_teacher(
    source: str | PreTrainedModel,
    opened: OpenedRun,
    rules: PackingRules,
    *,
    mean_loss: Callable[[PreTrainedModel], float],
    allow_untrained: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Return a run's frozen teacher, checked as in `open_model`, for all trainers.

    UntrainedTeacherError if its `mean_loss` of the first learned row is no better than chance.
    """
    model = open_model(source, opened, rules, side="teacher", dtype=dtype, device=device)
    model.train(False).requires_grad_(False)
    if not allow_untrained:
        text, rows = "the first learned row of the data", output_layer(model).vocab_size
        require_trained(mean_loss(model), rows, text=text)
    return model


def require_model_room(
    model: PreTrainedModel, opened: OpenedRun, rules: PackingRules, source: str, *, side: Side
) -> None:
    """Apply `require_room` to a loaded model."""
    is_student, shape = side == "student", model.config.get_text_config(decoder=True)
    length = rules.seq_length if is_student else rules.teacher_seq_length
    remedy = f"lower {'' if is_student else 'teacher_'}seq_length"
    require_room(
        opened,
        source,
        side=side,
        vocab_size=output_layer(model).vocab_size,
        seq_length=length,
        max_length=getattr(shape, "max_position_embeddings", None),
        remedy=remedy,
    )
    short = short_length(model.config)
    if short is not None and length > short:
        raise ValueError(
            f"a row holds {length} {side} tokens, and {source} reads all documents of a step "
            f"otherwise if one has more than {short} (longrope), so their losses would depend on "
            f"each other: {remedy} to {short}"
        )
