"""The models of a run: loaded, and refused if they don't belong to the data."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.dataset.tokenizers import Side
from pipeline.guidance import aggregate_teacher_losses
from pipeline.methods.hf_pass import compute_teacher_losses
from pipeline.models.fit import require_room, require_tokenizer
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import output_layer, require_own_losses
from pipeline.models.packed_check import keep_documents_apart
from pipeline.models.probe import require_trained
from pipeline.models.teacher_files import find_folder, find_teacher
from pipeline.streaming import AlignedRows, Rows
from pipeline.training.config import TrainConfig


def load_student(config: TrainConfig, rows: AlignedRows, device: torch.device) -> PreTrainedModel:
    """Return the student, fp32; the same weights for the same seed.

    Raises:
        ForeignTokenizerError: it comes with a different tokenizer from the data's.
        ValueError: its vocabulary or its length is too small for the data.
    """
    source = config.student
    if config.random_init:
        torch.manual_seed(config.seed)
        shape = AutoConfig.from_pretrained(source)
        model = cast(Any, AutoModelForCausalLM).from_config(shape).float().to(device)
        require_loaded(model, "student", rows)
    else:
        files = find_teacher(source, role="student")
        require_tokenizer(files.path, rows.dataset, side="student")
        model = load_language_model(str(files.path), device=str(device))
        require_model_room(model, rows, source, "student")
    return cast(PreTrainedModel, model)


def load_teacher(
    config: TrainConfig,
    rows: AlignedRows,
    device: torch.device,
    given: PreTrainedModel | None = None,
) -> PreTrainedModel | None:
    """Return the frozen teacher of a method that runs one, None for the others.

    Every trainer's comes from here, so that all refuse the same ones; one that is `given` is loaded
    already.

    Raises:
        ForeignTokenizerError: it comes with a different tokenizer from the data's.
        ValueError: it can't have given losses for this data, or its weights did not load.
    """
    manifest, kind, source = rows.manifest, config.kind, config.teaching.teacher
    if config.served.by != "running":
        return None
    if kind.one_vocabulary and manifest.student.sha256 != manifest.teacher.sha256:
        raise ValueError(
            f"method={kind.name} needs a teacher with the student's tokenizer, but "
            f"{config.data.path} was aligned with {manifest.teacher.source}: align with the "
            "student's as --teacher, too"
        )
    assert source is not None
    if given is None:
        files = find_teacher(source)
        require_tokenizer(files.path, rows.dataset, side="teacher")
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        teacher = load_language_model(str(files.path), dtype=dtype, device=str(device))
        require_model_room(teacher, rows, source, "teacher")
    else:
        teacher = cast(Any, given).train(False).to(device)
        require_loaded(teacher, "teacher", rows)
    teacher.requires_grad_(False)
    # The data's own text: unlike a text of ours, the teacher knows it if it knows any.
    mean = mean_teacher_loss(teacher, rows.__getitems__([0]).to(device))
    require_trained(mean, output_layer(teacher).vocab_size, text="the first row of the data")
    return teacher


def require_loaded(model: PreTrainedModel, side: Side, *every: AlignedRows) -> None:
    """Check a model that somebody else has loaded, as those that are loaded here are.

    Raises:
        ForeignTokenizerError: its folder has a different tokenizer from the data's.
        ValueError: no room for rows, losses that are not its own, or documents of a packed row that
            see each other.
    """
    source = str(model.config.name_or_path)
    if source:
        path = Path(source)
        path = path if path.suffix == ".gguf" else find_folder(source, role=side)
        require_tokenizer(path, every[0].dataset, side=side)
    for rows in every:
        require_model_room(model, rows, source or "model", side)
    require_own_losses(model)
    keep_documents_apart(model)


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


def require_model_room(model: PreTrainedModel, rows: AlignedRows, source: str, side: Side) -> None:
    """Check that a model's vocabulary and length are large enough for rows.

    Raises:
        ValueError: they aren't.
    """
    rules, prefix = rows.rules, "" if side == "student" else "teacher-"
    require_room(
        [each.dataset for each in rows.opened.datasets],
        getattr(rows.manifest, side),
        source,
        side=side,
        vocab_size=output_layer(model).vocab_size,
        seq_length=rules.seq_length if side == "student" else rules.teacher_seq_length,
        max_length=getattr(model.config, "max_position_embeddings", None),
        remedy=f"lower --{prefix}seq-length",
    )
