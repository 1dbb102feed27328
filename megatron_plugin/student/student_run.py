"""The student's run: arguments for `megatron.training.pretrain`."""

import logging
import os
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_plugin import checks
from megatron_plugin.arguments import VocagOptions, naming_arguments
from megatron_plugin.bridge import START_TIMEOUT, StudentBridge
from megatron_plugin.models.build import load_model, packed_layer_spec
from megatron_plugin.models.megatron_arguments import config_of_arguments, require_model
from megatron_plugin.models.weight_sources import Weights, open_weights
from megatron_plugin.student.data import StudentData
from megatron_plugin.student.forward_step import StepRules, run_forward_step
from megatron_plugin.student.guide import score_steps_ahead
from megatron_plugin.student.micro_batch import MicroBatch
from megatron_plugin.student.requests import connect
from megatron_plugin.student.run_identity import RunIdentity, require_same_run
from megatron_plugin.teacher.setup import load_teacher
from megatron_plugin.upstream import (
    get_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron_plugin.worlds import World
from pipeline.command_line.failures import FULL_DISK, hinted
from pipeline.models.fit import require_tokenizer
from pipeline.models.teacher_files import find_teacher
from pipeline.packing.opening import OpenedRun
from pipeline.streaming import AlignedRows

logger = logging.getLogger(__name__)


class StudentRun:
    """One student rank's part of a run, and a teacher's start and end.

    Give `pretrain` its `datasets`, `forward_step`, `store` and the configuration of `configure`,
    inside a `with` statement, which ends the teacher's world unless an exception is raised.

    Attributes:
        datasets: Megatron's dataset provider.
        store: of the student's world, None: torch's default.
        argument_defaults: for arguments not given.
    """

    def __init__(
        self,
        options: VocagOptions,
        world: World,
        opened: OpenedRun,
        checkpoint: Namespace | None = None,
    ) -> None:
        """Take the options and a resumed `checkpoint`'s arguments; load no model."""
        self._options = options
        self._world = world
        self._opened = opened
        self._checkpoint = checkpoint
        self._rules: StepRules | None = None
        self._written: list[str | Path | None] = [options.cache_folder]
        self._data = StudentData(options, opened)
        self._bridge: StudentBridge | None = None
        self._is_started = False
        self.store = world.store
        self.argument_defaults = {
            "tokenizer_type": "NullTokenizer",
            "vocab_size": opened.manifest.student.vocab_size,
            # Megatron divides by it even if nothing is evaluated.
            "eval_interval": 1000,
        }
        # With this attribute, `pretrain` builds the datasets on every rank.
        self.datasets = partial(self._datasets)
        self.datasets.is_distributed = True  # type: ignore[attr-defined]

    @naming_arguments()
    def configure(self, args: Namespace) -> Any:
        """Return the configuration for `pretrain`; ValueError for impossible settings."""
        options = self._options
        self._written += [args.save, args.tensorboard_dir]
        checks.require_student(args, options)
        checks.require_layout(args, self._checkpoint)
        checks.require_micro_batch(args, options, self._checkpoint)
        checks.require_schedule(args, self._checkpoint)
        if options.teaching.teacher:
            checks.require_service(args, options.teacher)
        if args.attention_backend.name != "auto":
            logger.warning("--attention-backend changes nothing: attention is torch's own here")
        self._data.open_held_out(args)
        vocab_size, max_length = args.vocab_size or args.padded_vocab_size, None
        config = gpt_config_from_args(args)
        config.transformer_layer_spec = packed_layer_spec
        if options.student is None:
            args.vocag_model_config = config_of_arguments(args, vocab_size)
        else:
            weights = self._open_student(args, options.student)
            args.vocag_model_config, vocab_size = weights.shape.config, weights.shape.vocab_size
            max_length = weights.shape.max_position_embeddings  # whatever the arguments say
            config.pre_wrap_hooks.append(partial(load_model, weights=weights))
        checks.require_rows(
            options.student,
            self._opened,
            vocab_size=vocab_size,
            seq_length=args.seq_length,
            max_length=max_length,
        )
        if args.vocag_model_config is None:
            logger.warning("vocag export can't export a student of this architecture")
        self._rules = StepRules(
            kind=options.kind,
            method=options.method,
            vocab_size=vocab_size,
            num_microbatches=checks.num_microbatches(args),
        )
        return pretrain_cfg_container_from_args(args, config)

    def forward_step(
        self,
        iterator: Iterator[MicroBatch],
        model: torch.nn.Module,
        return_schedule_plan: bool = False,
    ) -> tuple[Tensor, Any]:
        """Megatron's forward step."""
        assert self._rules is not None, "configure comes first"
        assert not return_schedule_plan, "only mixtures of experts ask for a schedule plan"
        return run_forward_step(self._rules, iterator, model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        # Megatron calls sys.exit on --exit-interval, --exit-duration and SIGTERM.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            if self._options.teacher.world_size and not self._is_started:
                # Without a missing --load, or to convert a checkpoint, Megatron ends before it asks
                # for data: the teacher's world still waits to be connected.
                self._start_teacher(get_args())
            self._data.drain()
            if self._bridge is not None:
                self._bridge.close()
        elif not isinstance(error, SystemExit | KeyboardInterrupt):
            # torch's CheckpointException isn't an Exception.
            explain_full_disks(error, self._written)

    def _open_student(self, args: Namespace, source: str) -> Weights:
        weights = open_weights(source)
        require_model(args, weights.shape)
        weights.shape.require_window(args.seq_length, what="student")
        require_tokenizer(weights.files.path, self._opened.dataset, side="student")
        return weights

    @naming_arguments()
    def _datasets(
        self, _: tuple[int, int | None, int], vp_stage: int | None = None
    ) -> tuple[Iterator[MicroBatch], Iterator[MicroBatch] | None, None]:
        args = get_args()
        if not self._is_started:  # for another model chunk
            rows = self._data.training_rows(args)
            self._take_up_run(args, rows)
            self._start_teacher(args)
            self._is_started = True
        train = self._data.training_batches(args, self._bridge, vp_stage)
        return train, self._data.validation_batches(args, self._bridge, vp_stage), None

    def _take_up_run(self, args: Namespace, rows: AlignedRows) -> None:
        """Record the run's identity in the arguments, which checkpoints keep."""
        identity = RunIdentity(
            stream=asdict(rows.state(0)),
            teacher=self._teacher_fingerprint(rows),
            guidance=self._options.guidance,
        )
        if args.iteration:
            require_same_run(args, self._checkpoint, identity, rows)
        args.vocag_run = asdict(identity)
        step = args.global_batch_size
        needed = checks.num_steps(args) * step
        if needed > len(rows):
            option, unit = ("--train-samples", 1) if args.train_samples else ("--train-iters", step)
            error = ValueError(
                f"{option} {needed // unit} need {needed} rows, {self._options.data.path} "
                f"has {len(rows)}: raise max_epochs there, or let a dataset repeat"
            )
            raise hinted(error, f"{option} {len(rows) // step * step // unit}")

    def _teacher_fingerprint(self, rows: AlignedRows) -> str | None:
        """Hash the teacher's files on one rank; in a collective, NCCL would see a hang."""
        if rows.teachers_rule.rules:
            return f"cached {rows.teachers_rule.fingerprint}"
        source = self._options.teaching.teacher
        if not source:
            return None
        store = dist.PrefixStore("vocag/teacher", dist.distributed_c10d._get_default_store())
        if dist.get_rank() == 0:
            store.set("sha256", find_teacher(source).sha256)
        store.wait(["sha256"], START_TIMEOUT)
        return store.get("sha256").decode()

    def _start_teacher(self, args: Namespace) -> None:
        options = self._options
        if options.teacher.world_size:
            assert self._world.bridge_store is not None
            self._bridge = connect(
                options.teacher, args, self._world.bridge_store, width=options.served.entries.width
            )
        elif options.teaching.teacher:
            score_steps_ahead(load_teacher(options, self._opened, args), self._data.guide)


def explain_full_disks(
    error: BaseException,
    folders: Iterable[str | Path | None],
    *,
    nearly_full_bytes: int = 16 << 20,
) -> None:
    """Log folders with fewer free bytes than `nearly_full_bytes`, and note them in the error.

    Megatron reports a full disk as a failed write of some tensor, or not at all.
    """
    free = {folder: _free_bytes(Path(folder)) for folder in folders if folder}
    full = [folder for folder, num_bytes in free.items() if num_bytes < nearly_full_bytes]
    told = "".join(format_exception(error))  # with its causes
    if full or any(os.strerror(number) in told for number in FULL_DISK):
        listed = ", ".join(f"{folder} ({free[folder] >> 20} MiB free)" for folder in full or free)
        message = f"no space is left on the disk of {listed}: make room or name another folder"
        logger.error(message)
        error.add_note(message)


def _free_bytes(folder: Path) -> int:
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
