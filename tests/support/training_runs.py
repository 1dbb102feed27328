"""Runs of `vocag train` on a dataset of two vocabularies, and a slow count of losses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.losses.loss_result import LossResult
from pipeline.methods.method import Method
from pipeline.streaming import AlignedRows, Reading, Rows, StreamConfig
from pipeline.training.config import TrainConfig
from pipeline.training.guided import GuidedStudent
from schemas.document import AlignedDocument
from tests.support.teaching import with_teaching

SEQ_LENGTH = 64


def pair_config(lab: Path, output: Path, method: Method, **changes: Any) -> TrainConfig:
    changes = with_teaching({"teacher": str(lab / "teacher_run/model"), **changes})
    config = TrainConfig(
        data=Reading(str(lab / "pair")),
        student=str(lab / "student"),
        output=output,
        teaching=changes.pop("teaching"),
        method=method,
        num_steps=6,
        warmup_steps=2,
        seq_length=SEQ_LENGTH,
        global_batch_size=4,
        micro_batch_size=2,
        num_epochs=4,
        learning_rate=1e-3,
    )
    return replace(config, **changes)


def rows_of(data: Path, seq_length: int = SEQ_LENGTH) -> AlignedRows:
    return AlignedRows(StreamConfig(Reading(str(data)), seq_length=seq_length))


def token_losses(
    model: torch.nn.Module, document: AlignedDocument, side: str, rows: AlignedRows
) -> list[float]:
    """Return the losses of a document's tokens (and of the student's EOS), one forward pass."""
    convention = getattr(rows.rules, side)
    end = [] if convention.end_token_id is None else [convention.end_token_id]
    ids = [convention.first_token_id, *getattr(document, side).input_ids.tolist(), *end]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(
        logits, torch.tensor(ids[1:]), reduction="none"
    ).tolist()


def loss_of(
    method: Method,
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batch: Rows,
    step: int = 0,
    **more: Any,
) -> LossResult:
    return GuidedStudent(student, method, **more)(batch, teacher=teacher, step=step)
