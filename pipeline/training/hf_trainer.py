"""The teacher-guided loss in the `Trainer` of Hugging Face transformers.

Rows travel as one tensor, which accelerate can move, cut and send.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from inspect import Parameter, Signature, signature
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, get_last_checkpoint

from pipeline.losses.loss_checks import Checks, put_off
from pipeline.losses.loss_result import LossResult, metric_values
from pipeline.methods import kind_of
from pipeline.methods.hf_pass import score_labels, student_states
from pipeline.methods.method import Method
from pipeline.streaming import AlignedRows, Rows, StreamConfig, StreamState, collate_rows
from pipeline.training.guided import language_model
from pipeline.training.held_out import heldout_bytes
from pipeline.training.run_opening import open_training
from pipeline.training.update import check_gradient, divide_gradients, naming_step

_ROWS_FILE = "vocag_rows.json"
_OWN = "would not be called: rows, loss and measures are those of vocag train; leave it out"
# Options of the Trainer that can't be taken.
_REFUSED = {
    **dict.fromkeys(("compute_loss_func", "compute_metrics", "data_collator"), _OWN),
    "preprocess_logits_for_metrics": _OWN,
    "train_dataset": "isn't taken: rows are packed from an aligned dataset; give data=",
    "eval_dataset": "isn't taken: an aligned dataset is measured; give heldout=",
    "model_init": "isn't taken: data and model are checked together; make a GuidedTrainer for each",
}

logger = logging.getLogger(__name__)


class GuidedTrainer(Trainer):
    """A Trainer whose student learns by one of the methods of `vocag train`.

    It also logs the method's metrics (`kept_fraction`, `teacher_loss` …). Evaluation gives
    `eval_loss`, nats per token of held-out text, and `eval_bits_per_byte`; with several sets
    `eval_NAME_loss` and so on.

    As in `vocag train`, a step's losses are summed over micro-batches and processes, and divided by
    all kept tokens.

    Attributes:
        rows: of the training data, in the order of the run.
    """

    loss_is_scaled_for_ga = False  # the Trainer divides by the number of micro-batches

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        data: StreamConfig | str | PathLike[str],
        method: Method,
        heldout: Mapping[str, str | PathLike[str]] | str | PathLike[str] | None = None,
        teacher: PreTrainedModel | None = None,
        allow_untrained_teacher: bool = False,
        **options: Any,
    ) -> None:
        """Open the data and check that everything fits together.

        Args:
            model: the student as `AutoModelForCausalLM` loads it, or one of peft around it.
            args: of the Trainer; they decide the rows of a step and the epochs. With
                `resume_from_checkpoint` data that have grown since, or of which documents were
                removed, are opened as they were.
            data: `StreamConfig("aligned", seq_length=2048,
                teaching=Teaching(stored_losses="teacher"))`; or a dataset's path.
            method: such as `Method("distill")`.
            heldout: an aligned dataset to measure, or several by name.
            teacher: a frozen model of `load_language_model`, in place of that in `data`.
            allow_untrained_teacher: accept a teacher that predicts no better than chance.
            options: of the Trainer: callbacks, optimizers, processing_class.

        Raises:
            ValueError: settings that would change rows or loss; data, model and method that don't
                fit.
        """
        _require_settings(args)
        _require_parts(model, options)
        if (args.eval_strategy != "no" or args.eval_on_start) and not heldout:
            strategy = cast(Any, args.eval_strategy).value
            asked = "eval_on_start" if strategy == "no" else f"eval_strategy={strategy}"
            raise ValueError(f"{asked} measures heldout: give it")
        _take_computations(model)
        one = heldout is None or isinstance(heldout, str | PathLike)
        resumed = _checkpoint(args, args.resume_from_checkpoint)
        opened = open_training(
            _stream_config(args, data),
            model,
            method,
            teacher=teacher,
            heldout=heldout,
            allow_untrained_teacher=allow_untrained_teacher,
            teacher_dtype=torch.bfloat16 if args.bf16 else torch.float32,
            group=dist.group.WORLD if args.world_size > 1 else None,
            device=args.device,
            with_tokenizer=args.should_save and options.get("processing_class") is None,
            saved=_saved_rows(resumed) if resumed else None,
        )
        if (kind := kind_of(method)).known and args.process_index == 0:
            logger.warning("method %s: %s", kind.name, kind.known)
        _require_steps(args, opened.rows)
        self.rows, sets = opened.rows, dict(opened.heldout)
        super().__init__(
            model=model,
            args=args,
            train_dataset=self.rows,
            eval_dataset=sets.get("heldout") if one else sets or None,
            **options,
        )
        if self.get_total_train_batch_size(args) != self.rows.config.global_batch_size:
            raise ValueError(
                "tensor, context and sequence parallelism and gradient_accumulation_kwargs change "
                "how many rows a step has: leave them out"
            )
        self._method, self._teacher, self._tokenizer = method, opened.teacher, opened.tokenizer
        self._guided = opened.guided
        self._draw = (-1, 0)
        self._sums: dict[str, Tensor] = {}
        self._step_sums = torch.zeros(2, dtype=torch.float64, device=args.device)  # nats, tokens
        self._checks = Checks()

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any
    ) -> TrainOutput:
        """Train as the Trainer does.

        Raises:
            StreamMismatchError: the checkpoint's run read other rows.
            ValueError: another trainer's checkpoint, the last step's, or none to resume from.
        """
        if found := _checkpoint(self.args, resume_from_checkpoint):
            step = self.rows.restore(_saved_rows(found)) // self.rows.config.global_batch_size
            if step >= _num_steps(self.args, self.rows):  # the Trainer would make one more
                raise ValueError(
                    f"{found} is of step {step}, the last one: load its model, or raise max_steps "
                    "or num_train_epochs"
                )
            if not (found / SCHEDULER_NAME).is_file():  # the Trainer would begin its optimizer anew
                raise ValueError(
                    f"{found} holds no {SCHEDULER_NAME}, and a run can't continue without its "
                    "optimizer: leave out save_only_model from the start, resume from another "
                    "checkpoint, or start from the model without resume_from_checkpoint"
                )
        self._step_sums.zero_()  # of a step that an error has ended
        self._sums, self._draw = {}, (-1, 0)  # of steps that an earlier call has not logged
        self._checks = Checks()
        return super().train(resume_from_checkpoint, *args, **options)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return a micro-batch's loss, divided by its places."""
        batch = Rows(inputs["rows"], self.rows.layout)
        result: LossResult = model(
            batch, compute=self._guided, teacher=self._teacher, step=self._next_draw()
        )
        sums = result.loss_sum.detach(), result.num_tokens
        self._step_sums += torch.stack([each.double() for each in sums])
        for name, value in result.metrics.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        loss = result.loss_sum / batch["loss_mask"].numel()
        return (loss, result) if return_outputs else loss

    def training_step(self, model: nn.Module, *args: Any, **options: Any) -> Tensor:
        """Add a micro-batch's gradient; after a step's last, divide by all kept tokens.

        Return the step's loss after the last, 0 before: the Trainer logs their sum.
        """
        size, rate = self.rows.config.global_batch_size, self.get_learning_rates()[0]
        with naming_step(self.state.global_step, size, rate):
            with put_off(self._checks) as checks:
                super().training_step(model, *args, **options)
            if not self.accelerator.sync_gradients:
                return torch.zeros((), device=self.args.device)
            sums = torch.stack([*self._step_sums, checks.count(self._step_sums)])
            nats, tokens, num_broken = self.accelerator.reduce(sums).tolist()
            self._step_sums.zero_()
            self._checks = Checks()
            checks.look(num_broken)  # of all processes: else the others would wait for this one
            # The Trainer, and the student's wrappers, averaged over micro-batches and processes.
            divide_gradients(model, max(tokens, 1) / (size * self.rows.config.seq_length))
            if self.accelerator.scaler is None:  # which skips infinite gradients, and expects them
                norm = self.accelerator.clip_grad_norm_(model.parameters(), math.inf)
                check_gradient(float(norm))
        return torch.tensor(nats / max(tokens, 1), device=self.args.device)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Also log the method's metrics, over all processes."""
        if self._sums and "loss" in logs:
            added = self.accelerator.reduce(torch.stack(list(self._sums.values())))
            logs |= metric_values(dict(zip(self._sums, added, strict=True)))
            self._sums = {}
        super().log(logs, *args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the student and the dataset's tokenizer, in a checkpoint also the run's position."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:  # with save_on_each_node, on each
            folder = Path(output_dir or str(self.args.output_dir))
            self._tokenizer.write(folder)
            if _internal_call and output_dir:
                stood = self.rows.state(self.state.global_step * self.rows.config.global_batch_size)
                (folder / _ROWS_FILE).write_text(json.dumps(asdict(stood)) + "\n", "utf-8")

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return an epoch's micro-batches, in the order of the run."""
        return self._loader(self.rows, self._train_batch_size, _Positions(self))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a held-out set's micro-batches."""
        own: Any = self.eval_dataset
        sets = own if isinstance(own, dict) else {"heldout": own}
        given = own if eval_dataset is None else eval_dataset
        rows = sets.get(given) if isinstance(given, str) else given
        # Others count the ends of texts, too: their bits per byte would be larger.
        if rows is None or not any(rows is each for each in sets.values()):
            raise ValueError(f"{given!r} isn't a held-out set: give GuidedTrainer heldout=")
        return self._loader(rows, self.args.eval_batch_size)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return an epoch's rows; those of the run have no end."""
        rows = cast(Any, dataloader).dataset
        return len(_Positions(self)) if rows is self.rows else len(rows)

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> EvalLoopOutput:
        """Measure a held-out set with equal weight for each token and byte."""
        rows = dataloader.dataset
        self._measured = rows.layout
        output = super().evaluation_loop(dataloader, *args, **options)
        # An array, or with eval_do_concat_batches=False a list of them.
        losses, tokens = np.vstack(cast(Any, output.predictions)).sum(0).tolist()
        prefix = options.get("metric_key_prefix", "eval")
        bits = losses / math.log(2)
        measured = {"loss": losses / tokens, "bits_per_byte": bits / heldout_bytes(rows)}
        cast(Any, output.metrics).update({f"{prefix}_{name}": v for name, v in measured.items()})
        return output

    def predict(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: only sums of losses are kept of a row."""
        raise ValueError(
            "GuidedTrainer has no predictions, for losses are measured in rows of many documents: "
            "call evaluate(), with heldout=, or the model itself"
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **options: Any
    ) -> tuple[None, Tensor, None]:
        """Return each row's summed loss and labels, float64 [rows, 2]."""
        batch = Rows(self._prepare_inputs(inputs)["rows"], self._measured)
        with torch.no_grad(), self.compute_loss_context_manager():
            losses: Tensor = model(batch, compute=self._label_losses)
        sums = losses.double().sum(-1), batch["loss_mask"].double().sum(-1)
        return None, torch.stack(sums, -1), None

    def _loader(
        self, rows: AlignedRows, batch_size: int, sampler: Sampler[int] | None = None
    ) -> DataLoader[Any]:
        args = self.args
        loader: DataLoader[Any] = DataLoader(
            rows,
            batch_size,
            sampler=sampler,
            drop_last=sampler is not None,
            collate_fn=_collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers and sampler is not None,
            generator=torch.Generator(),  # else each loader takes from the run's own
        )
        return cast("DataLoader[Any]", self.accelerator.prepare(loader))

    def _label_losses(self, batch: Rows) -> Tensor:
        student = language_model(self._guided.model)
        return score_labels(student, student_states(student, batch), batch).losses

    def _next_draw(self) -> int:
        """Number this micro-batch uniquely in the run."""
        step = self.state.global_step
        self._draw = (step, self._draw[1] + 1 if self._draw[0] == step else 0)
        number = step * self.args.gradient_accumulation_steps + self._draw[1]
        return self._method.draw_of(number, self.args.process_index, self.args.world_size)


class _Positions(Sampler[int]):
    """The run's positions in its current epoch."""

    def __init__(self, trainer: GuidedTrainer) -> None:
        self._trainer = trainer
        self._is_first = True

    def __len__(self) -> int:
        rows = self._trainer.rows  # a mixture's epoch need not be whole steps
        return _steps_per_epoch(rows) * rows.config.global_batch_size

    def __iter__(self) -> Iterator[int]:
        consumed = self._trainer.state.global_step * self._trainer.rows.config.global_batch_size
        # The Trainer itself skips what a resumed epoch has read; a callback may have ended others.
        start = consumed // len(self) * len(self) if self._is_first else consumed
        self._is_first = False
        return iter(range(start, min(start + len(self), len(self._trainer.rows))))


def _checkpoint(args: TrainingArguments, asked: str | bool | None) -> Path | None:
    """Return the folder of the checkpoint to resume from, the last one if `asked` is True."""
    if asked is not True:
        return Path(str(asked)) if asked else None
    folder = str(args.output_dir)
    found = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if found is None:
        raise ValueError(f"{folder} holds no checkpoint: leave out resume_from_checkpoint")
    return Path(found)


def _saved_rows(folder: Path) -> StreamState:
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text("utf-8"))  # a checkpoint's last file
        saved = json.loads((folder / _ROWS_FILE).read_text("utf-8"))
        return StreamState(**saved | {"generations": tuple(saved["generations"])})
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{folder} holds no whole {_ROWS_FILE} and {TRAINER_STATE_NAME}, so it isn't a "
            "checkpoint of a GuidedTrainer, or the run was killed while it was written, or used "
            "another version of vocag: resume from an earlier one, or start without "
            "resume_from_checkpoint, from that model"
        ) from None


def _collate(rows: Rows | Sequence[Rows]) -> dict[str, Tensor]:
    return {"rows": collate_rows(rows).buffer}


def _take_computations(model: nn.Module) -> None:
    """Let a model's forward pass compute, in its place, what a trainer gives it.

    A method that finds all in its model, so copies compute with their own weights, also behind
    accelerate's wrapper; pickled ones have their class's own. Its signature is the model's, by
    which `generate` decides what to pass.
    """
    parts = vars(model)
    # An earlier trainer's: the checks would see its precision, and accelerate keep it.
    parts.pop("_is_accelerate_prepared", None)
    model.forward = parts.pop("_original_forward", model.forward)
    own = parts.pop("_own_forward", model.forward)
    itself = Parameter("self", Parameter.POSITIONAL_ONLY)

    def forward(
        self: Any, *args: Any, compute: Callable[..., Any] | None = None, **options: Any
    ) -> Any:
        return (self._own_forward if compute is None else compute)(*args, **options)

    cast(Any, forward).__signature__ = Signature([itself, *signature(own).parameters.values()])
    model._own_forward = own
    model.forward = MethodType(forward, model)


def _stream_config(
    args: TrainingArguments, data: StreamConfig | str | PathLike[str]
) -> StreamConfig:
    config = data if isinstance(data, StreamConfig) else StreamConfig(data)
    size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if config.global_batch_size not in (1, size) or config.num_epochs not in (1, None):
        raise ValueError(
            f"StreamConfig says global_batch_size {config.global_batch_size} and num_epochs "
            f"{config.num_epochs}, TrainingArguments {size} rows a step and max_steps or "
            "num_train_epochs: leave both out of StreamConfig"
        )
    return replace(config, global_batch_size=size, num_epochs=None)


def _steps_per_epoch(rows: AlignedRows) -> int:
    """Return an epoch's whole steps; a small mixture may have fewer rows than a step."""
    return max(1, rows.samples_per_epoch // rows.config.global_batch_size)


def _num_steps(args: TrainingArguments, rows: AlignedRows) -> int:
    if args.max_steps > 0:
        return int(args.max_steps)
    return math.ceil(args.num_train_epochs * _steps_per_epoch(rows))


def _require_steps(args: TrainingArguments, rows: AlignedRows) -> None:
    steps, size = _num_steps(args, rows), rows.config.global_batch_size
    if steps * size > len(rows):
        raise ValueError(
            f"{steps} steps of {size} rows need {steps * size} rows, {rows.config.reading.path} "
            f"gives {len(rows)}: raise max_epochs in it, or lower max_steps or num_train_epochs"
        )


def _require_parts(model: object, options: Mapping[str, Any]) -> None:
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} {why}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {model!r} isn't a model: give load_language_model(…)")


def _require_settings(args: TrainingArguments) -> None:
    refused = {
        "label_smoothing_factor": (args.label_smoothing_factor != 0, "losses choose tokens"),
        "auto_find_batch_size": (args.auto_find_batch_size, "a step's rows are fixed"),
        "ignore_data_skip": (args.ignore_data_skip, "a resumed run would read rows again"),
        "batch_eval_metrics": (args.batch_eval_metrics, "sets are measured whole"),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen != "no",
            "it would be 0; a step reads its rows times seq_length tokens",
        ),
        "include_for_metrics": (bool(args.include_for_metrics), "no compute_metrics is called"),
        "use_liger_kernel": (
            args.use_liger_kernel
            and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True),
            "its loss would replace the method's; give "
            "liger_kernel_config={'fused_linear_cross_entropy': False}, or",
        ),
        "optim": (
            "layerwise" in args.optim or "lomo" in args.optim,
            f"{cast(Any, args.optim).value} makes its step in the backward pass, before the "
            "gradient could be divided by the step's tokens",
        ),
        "train_sampling_strategy": (
            args.train_sampling_strategy not in ("random", "sequential"),
            "rows are packed and shuffled already",
        ),
        "accelerator_config.split_batches": (
            cast(Any, args.accelerator_config).split_batches,
            "per_device_train_batch_size would not be a device's",
        ),
        "deepspeed": (
            getattr(args, "deepspeed_plugin", None) is not None,
            "it makes a step before the gradient could be divided by the step's tokens; use FSDP",
        ),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise ValueError(f"TrainingArguments.{name} doesn't work here: {reason}; leave it out")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process would use {args.n_gpu} GPUs by DataParallel: start the script with "
            f"torchrun --nproc-per-node {args.n_gpu}, or set CUDA_VISIBLE_DEVICES=0"
        )
