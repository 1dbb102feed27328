"""The student's run: what `megatron.training.pretrain` is given."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_plugin import checks
from megatron_plugin.arguments import VocagOptions
from megatron_plugin.models.arguments import config_of_arguments, require_model
from megatron_plugin.models.build import describe_layers, load_model, packed_layer_spec
from megatron_plugin.models.weights import Weights, open_weights
from megatron_plugin.student.batch import MicroBatch
from megatron_plugin.student.colocated import ColocatedTeacher
from megatron_plugin.student.data import StudentData
from megatron_plugin.student.forward_step import StepRules, run_forward_step
from megatron_plugin.student.full_disks import explain_full_disks
from megatron_plugin.student.requests import Connection, connect
from megatron_plugin.student.run_identity import RunIdentity, require_same_run
from megatron_plugin.student.skipped_steps import take_over_skipping
from megatron_plugin.upstream import (
    get_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron_plugin.worlds import World
from pipeline.streaming import AlignedRows
from schemas.manifest import Manifest

logger = logging.getLogger(__name__)


class StudentRun:
    """One student rank's part of a run: model, loss, and a teacher's start and end.

    Give `pretrain` its `datasets`, `forward_step`, `store` and the configuration of `configure`,
    inside a `with` statement: leaving it well ends the teacher's world, leaving it by an exception
    doesn't touch the bridge.

    Attributes:
        datasets: Megatron's dataset provider.
        store: of the student's world, None: torch's default.
        argument_defaults: for arguments that the user doesn't give.
    """

    def __init__(self, options: VocagOptions, world: World, manifest: Manifest) -> None:
        """Note what to do; nothing is opened yet."""
        self._options = options
        self._world = world
        self._manifest = manifest
        self._weights: Weights | None = None
        self._rules: StepRules | None = None
        self._written: list[str | Path | None] = [options.cache_folder]
        self._data = StudentData(options, manifest)
        self._connection: Connection | None = None
        self._colocated: ColocatedTeacher | None = None
        self._identity: RunIdentity | None = None
        self.store = world.store
        self.argument_defaults = {
            "tokenizer_type": "NullTokenizer",
            "vocab_size": manifest.student.vocab_size,
            # Megatron divides by it even where nothing is evaluated.
            "eval_interval": 1000,
        }
        # `pretrain` builds the datasets on every rank if an attribute of the function says so.
        self.datasets = partial(self._datasets)
        self.datasets.is_distributed = True  # type: ignore[attr-defined]

    def configure(self, args: Namespace) -> Any:
        """Check the arguments and return the configuration for `pretrain`.

        Args:
            args: Megatron's, validated.

        Raises:
            ValueError: what can't work, with the remedy.
        """
        options = self._options
        self._written += [args.save, args.tensorboard_dir]
        checks.require_student(args, options, self._manifest)
        if options.teacher.name:
            checks.require_service(args, options.teacher)
        vocab_size = args.vocab_size or args.padded_vocab_size
        config = gpt_config_from_args(args)
        config.transformer_layer_spec = packed_layer_spec
        if self._world.rank == 0:
            made_of = describe_layers(args.transformer_impl, args.params_dtype)
            logger.info("the student: %s", made_of)
        if options.student is not None:
            self._weights = self._open_student(args, options.student)
            vocab_size = self._weights.shape.vocab_size
            config.pre_wrap_hooks.append(self._load_student)
        take_over_skipping()
        args.vocag_model_config = (
            self._weights.shape.config if self._weights else config_of_arguments(args, vocab_size)
        )
        if args.vocag_model_config is None:
            logger.warning("export_hf can't export a student of this architecture")
        self._rules = StepRules(
            rule=options.rule,
            expectation=options.expectation,
            vocab_size=vocab_size,
            num_microbatches=checks.step_sizes(args).training,
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

    def __enter__(self) -> StudentRun:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        # Megatron ends a run by sys.exit on --exit-interval, --exit-duration and SIGTERM.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._end_teacher()
        elif isinstance(error, Exception):
            explain_full_disks(error, self._written)

    def _end_teacher(self) -> None:
        self._data.drain()
        if self._connection is not None and self._connection.bridge is not None:
            self._connection.bridge.close()

    def _open_student(self, args: Namespace, source: str) -> Weights:
        weights = open_weights(source)
        require_model(args, weights.shape)
        weights.shape.require_window(args.seq_length, what="student")
        checks.require_own_tokenizer(
            weights.folder, self._manifest, data=self._options.data, side="student"
        )
        return weights

    def _load_student(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        assert self._weights is not None
        load_model(chunks, self._weights)
        return chunks

    def _datasets(
        self, num_samples: tuple[int, int | None, int], vp_stage: int | None = None
    ) -> tuple[Iterator[MicroBatch], Iterator[MicroBatch] | None, None]:
        """Return endless iterators over training and validation rows; there is no test set."""
        args = get_args()
        self._take_up_run(args, self._data.open_training(args))
        self._start_teacher(args)
        train = self._data.training_batches(args, num_samples[0], self._connection, vp_stage)
        return train, self._data.validation_batches(args, self._connection, vp_stage), None

    def _take_up_run(self, args: Namespace, rows: AlignedRows) -> None:
        """Note in the arguments, which every checkpoint keeps, what the run is made of."""
        if self._identity is not None:
            return
        self._identity = RunIdentity(
            stream=asdict(rows.state(0)),
            teacher=self._teacher_fingerprint(rows),
            guidance=_guidance(self._options),
        )
        if args.iteration:
            require_same_run(args, self._identity, rows)
        args.vocag_run = asdict(self._identity)
        needed = args.train_iters * args.global_batch_size
        if needed > len(rows):
            raise ValueError(
                f"--train-iters {args.train_iters} need {needed} rows, {self._options.data} has "
                f"{len(rows)}: raise max_epochs there, or let a dataset repeat"
            )
        if dist.get_rank() == 0:
            for line in _epochs(rows, needed):
                logger.info("%s", line)

    def _teacher_fingerprint(self, rows: AlignedRows) -> str | None:
        """Hash the teacher's files on one rank; reading them takes seconds."""
        if rows.teacher_rule is not None:
            return f"cached {rows.teacher_rule.fingerprint}"
        if not self._options.teacher.name:
            return None
        found: list[str | None] = [None]
        if dist.get_rank() == 0:
            found = [open_weights(self._options.teacher.name).fingerprint()]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def _start_teacher(self, args: Namespace) -> None:
        teacher = self._options.teacher
        if not teacher.name or self._colocated is not None:
            return
        if not teacher.world_size:
            self._colocated = ColocatedTeacher(self._manifest, self._options, args)
        elif self._connection is None:
            assert self._world.bridge_store is not None
            self._connection = connect(teacher, args, self._world.bridge_store)


def _epochs(rows: AlignedRows, num_rows: int) -> list[str]:
    """Return how often a run reads its data, a line for each dataset."""
    read = zip(rows.plan.sources, rows.plan.counts_before(num_rows), strict=True)
    return [
        f"{source.name or 'the data'}: {count} rows of {source.num_rows} per epoch, "
        f"{count / source.num_rows:.2f} epochs"
        for source, count in read
    ]


def _guidance(options: VocagOptions) -> dict[str, Any]:
    return {
        "aggregation": options.aggregation,
        "expectation": options.expectation,
        **asdict(options.rule),
    }
