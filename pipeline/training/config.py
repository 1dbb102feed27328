"""The options of a training run, for `vocag train` and programs."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pipeline.command_line.failures import hinted
from pipeline.command_line.option_parsing import ModelSource, Option, require_known, require_least
from pipeline.command_line.pasted import pasted
from pipeline.methods import kind_of
from pipeline.methods.kind import MethodKind, Served
from pipeline.methods.method import Method
from pipeline.packing.reading import Reading
from pipeline.scoring.teaching import NOBODY, Teaching

if TYPE_CHECKING:
    from pipeline.streaming import StreamConfig

Schedule = Literal["cosine", "linear", "constant"]
Tracker = Literal["tensorboard", "trackio", "wandb"]
OPTION_GROUPS = {
    "data": "data and models",
    "method": "method (docs/concepts/guidance.md)",
    "num_steps": "steps",
    "evaluate_every": "measuring and keeping",
}
"""Titles of the help, and of a run's file, by each group's first option."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a Hugging Face student on an aligned dataset, with a teacher or without.

    On one GPU or a CPU, or data-parallel under torchrun with the same rows and losses. Run the same
    command again to continue from the last checkpoint, on a CPU bit for bit.

    Attributes:
        data: what to train on.
        student: folder, Hugging Face repository or .gguf file.
        output: folder of this run; run the same command again to continue from its checkpoint.
        random_init: start from random weights; only the student's configuration is read.
        teaching: who teaches.
        allow_untrained_teacher: accept a running teacher that predicts no better than chance.
        heldout: aligned datasets to measure bits per byte on, [NAME=]DATASET each.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row, by default the dataset's ratio plus 12.5 %.
        one_document_a_row: put one document, or a piece of a long one, in each row, as hybrid
            models need, whose state runs through a row; slower, because the rest is padding.
        num_epochs: passes over the data; a mixture's file has its own for each dataset.
        workers: processes that read ahead; 0: the run's own process reads.
        method: how the loss is made.
        num_steps: steps of the whole run; the learning rate's schedule ends there.
        exit_after: stop after this step, with a checkpoint, to continue later.
        global_batch_size: rows per step, over all processes.
        micro_batch_size: rows at a time in each process; the rest is accumulated.
        learning_rate: peak learning rate (default: 8e-5, the paper's for continued pretraining;
            random weights need about 10 times as much).
        schedule: learning-rate schedule after the warm-up.
        warmup_steps: steps of linear warm-up, from 0.
        min_lr_fraction: fraction of the peak at which cosine and linear end.
        weight_decay: weight decay of matrices.
        clip_norm: largest norm of the gradient.
        seed: seed of the order, the initial weights and random choices.
        device: device such as cpu or cuda:1 (default: the GPU if there is one).
        bf16: compute in bfloat16; weights, logits and losses stay fp32.
        compile: compile the student's layers (torch.compile): the first step takes a minute more,
            and with other shapes of rows another one.
        gradient_checkpointing: keep of each layer its input alone and compute it again for the
            gradient: less memory, a third more time.
        evaluate_every: steps between measurements of --heldout; 0: at the end only.
        checkpoint_every: steps between checkpoints; 0: at the end only.
        export_every: steps between Hugging Face folders OUTPUT/step-N; 0: only OUTPUT/model at the
            end.
        dry_run: print the rows, steps, memory, disk and hours that the run would take, and end.
        tracker: also send each step's values to a tracker, by accelerate.
    """

    data: Reading
    student: ModelSource
    output: Annotated[Path, Option("FOLDER")]
    random_init: bool = False
    teaching: Teaching = NOBODY
    allow_untrained_teacher: bool = False
    heldout: Annotated[tuple[str, ...], Option("DATASET")] = ()
    seq_length: int = 512
    teacher_seq_length: int | None = None
    one_document_a_row: bool = False
    num_epochs: int = 1
    workers: int = 0
    method: Method
    num_steps: int = 1000
    exit_after: int | None = None
    global_batch_size: int = 8
    micro_batch_size: int = 4
    learning_rate: float = 8e-5
    schedule: Schedule = "cosine"
    warmup_steps: int = 50
    min_lr_fraction: float = 0.1
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    device: Annotated[str, Option("NAME")] = ""
    bf16: bool = False
    compile: bool = False
    gradient_checkpointing: bool = False
    evaluate_every: int = 0
    checkpoint_every: int = 500
    export_every: int = 0
    dry_run: bool = False
    tracker: Tracker | None = None

    def __post_init__(self) -> None:
        """Check options without the data."""
        self.kind.serve(self.method, self.teaching, self.data, self.seq_length)
        require_known("schedule=", [self.schedule], get_args(Schedule))
        require_least(self, "num_steps", "global_batch_size", "micro_batch_size", "exit_after")
        intervals = ("evaluate_every", "checkpoint_every", "export_every")
        require_least(self, "workers", *intervals, least=0)
        for name in ("learning_rate", "min_lr_fraction", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if not value >= 0 or (value == math.inf and name != "clip_norm"):
                raise ValueError(f"{name}={value} isn't a number from 0 on")
        if self.min_lr_fraction > 1:
            raise ValueError(f"min_lr_fraction={self.min_lr_fraction} is above 1: 10 % is 0.1")
        if self.clip_norm == 0:
            refusal = ValueError("clip_norm=0.0 would clip every gradient to nothing")
            raise hinted(refusal, "clip_norm=inf  # clips none")
        self._require_own_output()
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} has more than 64 bits: choose a shorter one")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} isn't a multiple of "
                f"micro_batch_size={self.micro_batch_size}: change one"
            )
        if not 0 <= self.warmup_steps < self.num_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be below num_steps={self.num_steps}"
            )
        names = list(self.heldout_sets)
        if len(names) < len(self.heldout):
            raise ValueError(
                f"two of heldout={' '.join(self.heldout)} have one name: write NAME=DATASET"
            )

    def _require_own_output(self) -> None:
        """Raise ValueError if a model is read where the run would write one."""
        for source in filter(None, (self.student, self.teaching.teacher)):
            place = Path(source).resolve()
            if place.parent == self.output.resolve() and (
                place.name == "model" or place.name.startswith("step-")
            ):
                error = ValueError(
                    f"output={self.output} is the folder of {source}, which the run would "
                    "overwrite: name another"
                )
                raise hinted(error, f"output={pasted(f'{self.output}-2')}")

    @property
    def heldout_sets(self) -> dict[str, str]:
        """The held-out datasets by name: the part before "=", or the folder's name."""
        return dict(map(_split_name, self.heldout))

    @property
    def last_step(self) -> int:
        """The step after which this start ends."""
        return min(self.num_steps, self.exit_after or self.num_steps)

    @property
    def kind(self) -> MethodKind:
        """The method's kind."""
        return kind_of(self.method)

    @property
    def served(self) -> Served:
        """Where the method's needs of a teacher come from."""
        return self.kind.serve(self.method, self.teaching)

    @property
    def stream(self) -> "StreamConfig":
        """How the run's rows are read."""
        from pipeline.streaming import StreamConfig

        return StreamConfig(
            self.data,
            seq_length=self.seq_length,
            teacher_seq_length=self.teacher_seq_length,
            one_document_a_row=self.one_document_a_row,
            seed=self.seed,
            global_batch_size=self.global_batch_size,
            num_epochs=self.num_epochs,
            teaching=self.teaching,
            **self.kind.row_needs(self.method, self.served),
        )


def _split_name(source: str) -> tuple[str, str]:
    name, equals, path = source.partition("=")
    if equals and name and "://" not in name and not Path(source).exists():
        return name, path
    return Path(source.removesuffix("manifest.json")).name, source
