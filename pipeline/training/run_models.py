"""Load the models of a run."""

import logging
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from pipeline.guidance import aggregate_teacher_losses
from pipeline.methods.hf_pass import compute_teacher_losses
from pipeline.models.hf_models import recompute_layers
from pipeline.models.running_teacher import open_model, open_running_teacher
from pipeline.models.weights import make_model, read_config
from pipeline.streaming import AlignedRows, Rows
from pipeline.training.config import TrainConfig

logger = logging.getLogger(__name__)


def load_student(config: TrainConfig, rows: AlignedRows, device: torch.device) -> PreTrainedModel:
    """Return the student, fp32; equal seeds give equal weights.

    Errors as in `open_model`. Only layers are compiled or recomputed: the loss is outside.
    """
    if rows.rules.one_document_a_row:
        padding = [100 * each.plan.padding()[0] for each in rows.datasets]
        logger.warning(
            "one document a row: %s %% of the student tokens of rows are padding",
            ", ".join(f"{share:.0f}" for share in padding),
        )
    source: str | PreTrainedModel = config.student
    if config.random_init:
        torch.manual_seed(config.seed)
        source = make_model(read_config(config.student)).float()
    student = open_model(source, rows.opened, rows.rules, side="student", device=device)
    if config.gradient_checkpointing:
        recompute_layers(student)
    if config.compile:
        cast(Any, student.base_model).compile()
    return student


def load_teacher(
    config: TrainConfig,
    rows: AlignedRows,
    device: torch.device,
    given: PreTrainedModel | None = None,
) -> PreTrainedModel | None:
    """Return the frozen teacher, loaded unless given; None for methods that run none.

    Errors as in `open_running_teacher`.
    """
    source = config.teaching.teacher if given is None else given
    if config.served.by != "running" or source is None:
        return None
    return open_running_teacher(
        source,
        rows.opened,
        rows.rules,
        allow_untrained=config.allow_untrained_teacher,
        accepted_by="--allow-untrained-teacher" if given is None else None,
        mean_loss=lambda teacher: mean_teacher_loss(teacher, rows.__getitems__([0]).to(device)),
        one_vocabulary_for=config.kind.name if config.kind.one_vocabulary else "",
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        device=device,
    )


def mean_teacher_loss(teacher: PreTrainedModel, batch: Rows) -> float:
    """Return the teacher's mean loss over the labels that it covers, nats; not over padding.

    A good model may find padding as unlikely as an untrained one finds all tokens.
    """
    guidance = aggregate_teacher_losses(
        compute_teacher_losses(teacher, batch),
        batch["teacher_spans"],
        "mean",
        teacher_loss_mask=batch.teacher_has_loss,
    )
    return float(guidance[batch["loss_mask"].bool()].nanmean())
