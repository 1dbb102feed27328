"""Open a run's data and models, for every trainer."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from pipeline.command_line.failures import HINT
from pipeline.methods import kind_of
from pipeline.methods.hf_pass import mean_teacher_loss
from pipeline.methods.method import Method
from pipeline.models.exported_tokenizer import ExportedTokenizer
from pipeline.models.running_teacher import (
    name_of,
    open_model,
    open_running_teacher,
    require_model_room,
)
from pipeline.models.weights import require_reloadable
from pipeline.streaming import AlignedRows, Rows, StreamConfig, StreamState
from pipeline.training.export import prove_tokenizer
from pipeline.training.guided import GuidedStudent, language_model
from pipeline.training.held_out import open_heldout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedTraining:
    """Data and models that fit together.

    Attributes:
        rows: of the training data, in the order of the run.
        guided: the student, whose forward pass is its loss.
        teacher: frozen, for `guided(batch, teacher=teacher)`; None if the method runs none.
        heldout: rows of held-out sets.
        tokenizer: of the data, with the student's chat template: `tokenizer.write(folder)`.
    """

    rows: AlignedRows
    guided: GuidedStudent
    teacher: PreTrainedModel | None = None
    heldout: Mapping[str, AlignedRows] = field(default_factory=dict)
    tokenizer: ExportedTokenizer = field(default_factory=lambda: ExportedTokenizer({}))

    @property
    def student(self) -> PreTrainedModel:
        """The model of transformers, without peft's around it."""
        return language_model(self.guided.model)


def open_training(
    data: StreamConfig | AlignedRows | str | PathLike[str],
    student: nn.Module | str | PathLike[str],
    method: Method,
    *,
    teacher: PreTrainedModel | None = None,
    heldout: Mapping[str, str | PathLike[str]] | str | PathLike[str] | None = None,
    allow_untrained_teacher: bool = False,
    teacher_dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    with_tokenizer: bool = True,
    saved: StreamState | None = None,
) -> OpenedTraining:
    """Open data and models, as `vocag train` does; refuse those that don't fit together.

    Args:
        data: what to read, and whose stored losses or which running teacher teaches; opened rows
            must have the distributions that the method needs.
        student: folder, repository or .gguf file, loaded in fp32; or a model of transformers, or
            one of peft around it, which stays on its device.
        method: such as `Method("distill")`.
        teacher: a frozen model in place of that in `data`.
        heldout: an aligned dataset, which is named heldout, or several by name.
        allow_untrained_teacher: accept a running teacher that predicts no better than chance.
        teacher_dtype: of a teacher loaded here.
        group: the processes that choose tokens together if the method's scope is "group".
        device: of models loaded here, and of a given teacher.
        with_tokenizer: make the student's tokenizer; else it is empty.
        saved: of a checkpoint that will be restored: data that have grown, or of which documents
            were removed, are opened as they were.

    Raises:
        ForeignTokenizerError: a model's or held-out set's tokenizer differs from the data's.
        UntrainedTeacherError: a running teacher predicts no better than chance.
        ValueError: other parts don't fit together; and errors of `AlignedRows`.

    Example:
        >>> opened = open_training(StreamConfig("aligned"), "models/student", Method("full"))
        ... # doctest: +SKIP
        >>> opened.guided(next(iter(load_batches(opened.rows, micro_batch_size=4)))).loss_sum
        ... # doctest: +SKIP
    """
    kind, config, device = kind_of(method), _stream_config(data), torch.device(device)
    teaching = config.teaching
    if isinstance(heldout, str | PathLike):
        heldout = {"heldout": heldout}
    if teacher is not None:
        if not isinstance(teacher, nn.Module):
            raise ValueError(
                f"teacher {teacher!r} isn't a model: give load_language_model(…), or its name in "
                "data, StreamConfig(…, teaching=Teaching(teacher=…))"
            )
        teaching = replace(teaching, teacher=name_of(teacher))
    with _hinting_at_config(config):
        served = kind.serve(method, teaching, config.reading, config.seq_length)
    if teaching.teacher and served.by == "nothing":
        logger.warning("method=%s asks no teacher: %s isn't read", kind.name, teaching.teacher)
    rows = _open_rows(data, config, kind.row_needs(method, served), saved)
    kind.require_rows(method, rows)
    _warn_of_padding(rows)
    sets = open_heldout({name: fspath(path) for name, path in (heldout or {}).items()}, rows)
    source = student if isinstance(student, nn.Module) else fspath(student)
    own = _open_student(source, rows, sets, device)
    running = None
    if served.by == "running":
        running = open_running_teacher(
            teacher or str(teaching.teacher),
            rows.opened,
            rows.rules,
            mean_loss=lambda model: mean_teacher_loss(model, _first_learned(rows).to(device)),
            allow_untrained=allow_untrained_teacher,
            dtype=teacher_dtype,
            device=device,
        )
    guided = GuidedStudent.of_run(own, method, rows, served, group)
    tokenizer = ExportedTokenizer({})
    if with_tokenizer:
        tokenizer = prove_tokenizer(rows, language_model(own))
    return OpenedTraining(rows, guided, running, sets, tokenizer)


def _stream_config(data: StreamConfig | AlignedRows | str | PathLike[str]) -> StreamConfig:
    if isinstance(data, AlignedRows):
        return data.config
    return data if isinstance(data, StreamConfig) else StreamConfig(data)


@contextmanager
def _hinting_at_config(config: StreamConfig) -> Iterator[None]:
    """Turn a hint at stored losses into the `data` that reads them."""
    try:
        yield
    except ValueError as error:
        for number, note in enumerate(notes := getattr(error, "__notes__", [])):
            if note.startswith(start := f"{HINT}stored_losses="):
                teaching = f'Teaching(stored_losses="{note.removeprefix(start).strip('"')}")'
                path = config.reading.path
                lengths = f"seq_length={config.seq_length}"
                notes[number] = f'{HINT}StreamConfig("{path}", {lengths}, teaching={teaching})'
        raise


def _open_rows(
    data: object, config: StreamConfig, needs: Mapping[str, Any], saved: StreamState | None
) -> AlignedRows:
    if not isinstance(data, AlignedRows):
        return AlignedRows(replace(config, **needs), saved)
    for name, needed in needs.items():
        if needed and not getattr(config, name):
            raise ValueError(
                f"the rows were opened without {name}, which the method needs: give open_training "
                f"their StreamConfig, or open them with {name}=True"
            )
    return data


def _first_learned(rows: AlignedRows) -> Rows:
    """Return the first row with a teacher token that is learned: a long prompt's have none."""
    for position in range(rows.samples_per_epoch):
        row = rows.__getitems__([position])
        if bool(row.teacher_has_loss.any()):
            break
    return row


def _open_student(
    source: nn.Module | str,
    rows: AlignedRows,
    sets: Mapping[str, AlignedRows],
    device: torch.device,
) -> nn.Module:
    if isinstance(source, nn.Module):
        device = next(source.parameters()).device
    model = open_model(
        source if isinstance(source, str) else language_model(source),
        rows.opened,
        rows.rules,
        side="student",
        device=device,
    )
    name = source if isinstance(source, str) else name_of(model)
    has_adapter = isinstance(source, nn.Module) and source is not model
    if getattr(model, "hf_quantizer", None) is not None and not has_adapter:
        raise ValueError(
            f"{name} is quantised, and such weights can't be trained: name the model in bfloat16 "
            "or float32, or train an adapter"
        )
    if isinstance(source, str):  # a caller's own class is the caller's to save
        require_reloadable(model)
    for held_out in sets.values():
        require_model_room(model, held_out.opened, held_out.rules, name, side="student")
    return source if isinstance(source, nn.Module) else model


def _warn_of_padding(rows: AlignedRows) -> None:
    if rows.rules.one_document_a_row:
        padding = [100 * each.plan.padding()[0] for each in rows.datasets]
        logger.warning(
            "one document a row: %s %% of the student tokens of rows are padding",
            ", ".join(f"{share:.0f}" for share in padding),
        )
