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
from megatron.core import parallel_state
from megatron.training import get_args
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader

from megatron_plugin import checks
from megatron_plugin.arguments import TeacherOptions, VocagOptions
from megatron_plugin.bridge import START_TIMEOUT, Pairing, StudentBridge
from megatron_plugin.models.arguments import config_of_arguments, require_model
from megatron_plugin.models.build import load_model, packed_layer_spec
from megatron_plugin.models.weights import Weights, open_weights
from megatron_plugin.student.batch import MicroBatch, Origin, micro_batch
from megatron_plugin.student.colocated import ColocatedTeacher
from megatron_plugin.student.forward_step import StepRules, run_forward_step
from megatron_plugin.student.full_disks import explain_full_disks
from megatron_plugin.student.meeting import StudentMeeting, meet_before_steps
from megatron_plugin.student.requests import GuidedBatches
from megatron_plugin.student.run_identity import RunIdentity, require_same_run
from megatron_plugin.student.skipped_steps import take_over_skipping
from megatron_plugin.student.step_schedule import read_steps_ahead
from megatron_plugin.worlds import World
from pipeline.packing.order import ReplicaBatches
from pipeline.packing.rules import Convention
from pipeline.streaming import AlignedRows, Rows, StreamConfig, collate_rows
from schemas.manifest import Manifest

logger = logging.getLogger(__name__)

# Two global batches: one that is scored while one is computed, and one in hand.
_TRAINING_LOOKAHEAD = 2


class StudentRun:
    """One student rank's part of a run: data, loss and the bridge to the teacher.

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
        self._bridge: StudentBridge | None = None
        self._meeting: StudentMeeting | None = None
        self._guided: list[GuidedBatches] = []
        self._opened: dict[str, AlignedRows] = {}
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
        if options.teacher is not None and not options.teacher.is_cached:
            checks.require_service(args, options.teacher)
        vocab_size = args.vocab_size or args.padded_vocab_size
        config = gpt_config_from_args(args)
        config.transformer_layer_spec = packed_layer_spec
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
        for guided in self._guided:
            guided.drain()
        if self._bridge is not None:
            self._bridge.close()

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
        sizes = checks.step_sizes(args)
        training = self._open_rows(self._options.data, args.seq_length, args.global_batch_size)
        self._take_up_run(args, training)
        self._start_teacher(args)
        train = self._batches(training, num_samples[0], args.consumed_train_samples, args)
        train = self._guide(train, sizes.training, _TRAINING_LOOKAHEAD, vp_stage)
        valid = None
        if self._options.validation_data is not None and args.eval_iters:
            rows = self._open_rows(
                self._options.validation_data, args.seq_length, args.eval_global_batch_size
            )
            valid = self._batches(rows, None, args.consumed_valid_samples, args)
            valid = self._guide(valid, sizes.validation, 1, vp_stage)
        return train, valid, None

    def _open_rows(self, path: str, seq_length: int, global_batch_size: int) -> AlignedRows:
        """Open a dataset, once for all of this rank's model chunks."""
        options = self._options
        if path in self._opened:
            return self._opened[path]
        teacher, losses = options.teacher, None
        if teacher is not None and teacher.is_cached:
            # Of validation data the same teacher's, whatever names it: it was opened after.
            training = self._opened.get(options.data)
            rule = training.teacher_rule if training is not None else None
            losses = teacher.losses if rule is None else rule.fingerprint
        self._opened[path] = AlignedRows(
            StreamConfig(
                path=path,
                seq_length=seq_length,
                # The training data decides for both, since the teacher has one length.
                teacher_seq_length=checks.teacher_seq_length(
                    options.teacher, self._manifest, seq_length
                ),
                # … and its conventions, whichever those of the validation data are.
                student=Convention.of_tokenizer(self._manifest.student, ends=True),
                teacher=Convention.of_tokenizer(self._manifest.teacher, ends=False),
                seed=get_args().seed,
                global_batch_size=global_batch_size,
                # Samples are numbers; the run's own length ends it.
                num_epochs=1 << 30,
                shuffle_shards=options.shuffle_shards,
                on_damage=options.on_damage,
                cache_folder=options.cache_folder,
                cache_bytes=options.cache_gigabytes << 30,
                stored_losses=losses,
            )
        )
        return self._opened[path]

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
        if dist.get_rank() == 0:
            epochs = args.train_iters * args.global_batch_size / rows.samples_per_epoch
            logger.info("%d rows per epoch, %.2f epochs", rows.samples_per_epoch, epochs)

    def _teacher_fingerprint(self, rows: AlignedRows) -> str | None:
        """Hash the teacher's files on one rank; reading them takes seconds."""
        if self._options.teacher is None:
            return None
        if rows.teacher_rule is not None:
            return f"cached {rows.teacher_rule.fingerprint}"
        found: list[str | None] = [None]
        if dist.get_rank() == 0:
            found = [open_weights(self._options.teacher.source).fingerprint()]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def _start_teacher(self, args: Namespace) -> None:
        teacher = self._options.teacher
        if teacher is None or teacher.is_cached:
            return
        if self._colocated is not None:
            return
        if not teacher.world_size:
            self._colocated = ColocatedTeacher(teacher, self._manifest, self._options, args)
            return
        if self._meeting is None:
            self._connect(teacher, args)

    def _connect(self, teacher: TeacherOptions, args: Namespace) -> None:
        """Connect the leaders with the teacher; all ranks wait until they are."""
        store = self._world.bridge_store
        assert store is not None
        self._meeting = StudentMeeting(
            teacher_minutes=teacher.timeout_minutes,
            distributed_minutes=args.distributed_timeout_minutes,
        )
        read_steps_ahead()
        replicas = range(args.data_parallel_size)
        if _computes_loss() and parallel_state.get_tensor_model_parallel_rank() == 0:
            replica = parallel_state.get_data_parallel_rank()
            self._bridge = StudentBridge(
                store,
                Pairing(len(replicas), teacher.num_replicas),
                replica=replica,
                timeout_minutes=teacher.timeout_minutes,
            )
            store.set(f"connected/{replica}", "")
        # The leaders wait START_TIMEOUT for the teacher's, and say what went wrong.
        store.wait([f"connected/{replica}" for replica in replicas], 2 * START_TIMEOUT)

    def _batches(
        self, rows: AlignedRows, num_samples: int | None, consumed: int, args: Namespace
    ) -> Iterator[MicroBatch]:
        """Read micro-batches from where the run stands to its last sample."""
        training = num_samples is not None
        size = args.micro_batch_size if training else args.eval_micro_batch_size
        indices = ReplicaBatches(
            num_samples=num_samples if num_samples is not None else len(rows),
            consumed_samples=consumed,
            micro_batch_size=size,
            global_batch_size=rows.config.global_batch_size,
            replica=parallel_state.get_data_parallel_rank(),
            num_replicas=parallel_state.get_data_parallel_world_size(),
        )
        loader: DataLoader[Rows] = DataLoader(
            rows,
            batch_sampler=indices,
            collate_fn=collate_rows,
            num_workers=args.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        device = torch.device("cuda")
        first = consumed // (size * parallel_state.get_data_parallel_world_size())
        return (
            micro_batch(batch, first + step, device, origin=Origin(rows, tuple(samples)))
            for step, (batch, samples) in enumerate(zip(loader, indices, strict=True))
        )

    def _guide(
        self,
        batches: Iterator[MicroBatch],
        num_microbatches: int,
        lookahead: int,
        vp_stage: int | None,
    ) -> Iterator[MicroBatch]:
        teacher = self._options.teacher
        if teacher is None or not (teacher.is_cached or teacher.world_size):
            return batches
        if teacher.is_cached:
            if not _computes_loss(vp_stage):
                return batches
            return (batch.guided_by_stored(self._options.aggregation) for batch in batches)
        assert self._meeting is not None
        if not _computes_loss():
            first = vp_stage in (None, 0)  # one chunk's batches wait for all of the rank's
            return meet_before_steps(batches, self._meeting, num_microbatches) if first else batches
        if not _computes_loss(vp_stage):
            return batches
        guided = GuidedBatches(
            batches,
            self._bridge,
            num_microbatches=num_microbatches,
            how=self._options.aggregation,
            tensor_parallel_group=parallel_state.get_tensor_model_parallel_group(),
            lookahead=lookahead,
            meet=self._meeting.wait,
        )
        self._guided.append(guided)
        return guided


def _computes_loss(vp_stage: int | None = None) -> bool:
    """Whether this rank's chunk is the model's last."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return False
    num_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return vp_stage is None or num_chunks is None or vp_stage == num_chunks - 1


def _guidance(options: VocagOptions) -> dict[str, Any]:
    return {
        "aggregation": options.aggregation,
        "expectation": options.expectation,
        **asdict(options.rule),
    }
