"""A student rank's training and validation data."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch

from megatron_plugin import checks
from megatron_plugin.arguments import VocagOptions
from megatron_plugin.bridge import StudentBridge
from megatron_plugin.models.places import own_share
from megatron_plugin.student.guide import Guide
from megatron_plugin.student.micro_batch import MicroBatch, micro_batch
from megatron_plugin.student.requests import GuidedBatches
from megatron_plugin.upstream import parallel_state
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.packing.opening import OpenedRun, open_run
from pipeline.packing.reading import Reading
from pipeline.streaming import AlignedRows, StreamConfig, load_batches
from pipeline.streaming.vocabularies import vocabulary_map

# Global batches: one is scored while another is computed, and one is in reserve.
_TRAINING_LOOKAHEAD, _VALIDATION_LOOKAHEAD = 2, 1


class StudentData:
    """Rows of both datasets, their micro-batches and losses."""

    def __init__(self, options: VocagOptions, opened: OpenedRun) -> None:
        """Take the training data."""
        self._options = options
        self._opened = opened
        self._held_out: OpenedRun | None = None
        self._training: AlignedRows | None = None
        self._validation: AlignedRows | None = None
        self._asking: list[GuidedBatches] = []
        self.guide = Guide(
            self._leave_out,
            lambda: self._vocabulary_map,
            options.served.entries,
            uses_cells=options.kind.uses_cells(options.method),
        )

    def open_held_out(self, args: Namespace) -> None:
        """Open the validation data, if any.

        DatasetError for an unfinished dataset, ForeignTokenizerError for other tokenizers.
        """
        path = self._options.validation_data
        if path is not None and args.eval_iters:
            opened = open_run(Reading(path), seed=args.seed, max_epochs=None)
            training = self._opened.manifest
            checks.require_same_tokenizers(path, opened.manifest, training)
            # Texts get the training data's tokens around them.
            manifest = replace(opened.manifest, student=training.student, teacher=training.teacher)
            self._held_out = replace(opened, manifest=manifest)

    def training_rows(self, args: Namespace) -> AlignedRows:
        """Return the training rows, shared by this rank's model chunks."""
        if self._training is None:
            config = self._config(self._opened, args, args.global_batch_size)
            self._training = AlignedRows(config, opened=self._opened)
            self._options.kind.require_rows(self._options.method, self._training)
        return self._training

    def training_batches(
        self, args: Namespace, bridge: StudentBridge | None, vp_stage: int | None
    ) -> Iterator[MicroBatch]:
        """Return a model chunk's micro-batches, from the run's position on."""
        batches = _load_micro_batches(
            self.training_rows(args),
            args.micro_batch_size,
            consumed_samples=args.consumed_train_samples,
            num_samples=checks.num_steps(args) * args.global_batch_size,
            num_workers=args.num_workers,
        )
        per_step = checks.num_microbatches(args)
        return self._guided(batches, per_step, _TRAINING_LOOKAHEAD, bridge, vp_stage)

    def validation_batches(
        self, args: Namespace, bridge: StudentBridge | None, vp_stage: int | None
    ) -> Iterator[MicroBatch] | None:
        """Return endless validation micro-batches; None without validation."""
        if self._held_out is None:
            return None
        if self._validation is None:
            self._validation = self._validation_rows(self._held_out, args)
        batches = _load_micro_batches(
            self._validation,
            args.eval_micro_batch_size,
            consumed_samples=args.consumed_valid_samples,
            num_workers=args.num_workers,
            of_validation=True,
        )
        per_step = checks.num_microbatches(args, "eval_")
        return self._guided(batches, per_step, _VALIDATION_LOOKAHEAD, bridge, vp_stage)

    def drain(self) -> None:
        """Take outstanding replies, to close the bridge."""
        for asking in self._asking:
            asking.drain()

    def _validation_rows(self, held_out: OpenedRun, args: Namespace) -> AlignedRows:
        config = self._config(held_out, args, args.eval_global_batch_size)
        own = tuple(each.fingerprint for each in self.training_rows(args).teachers_rule.rules)
        if own:
            config = replace(config, teaching=replace(config.teaching, stored_losses=own))
        rows = AlignedRows(config, opened=held_out)
        if rows.plan.num_rows is not None:
            raise ValueError(
                f"--vocag-validation-data {self._options.validation_data} ends after {len(rows)} "
                "rows, but validation continues: let one of its datasets repeat"
            )
        return rows

    def _config(self, opened: OpenedRun, args: Namespace, global_batch_size: int) -> StreamConfig:
        options = self._options
        return StreamConfig(
            opened.reading,
            seq_length=args.seq_length,
            # The training data decides for both, since the teacher has one length.
            teacher_seq_length=checks.teacher_seq_length(
                options, self._opened.manifest, args.seq_length
            ),
            seed=args.seed,
            global_batch_size=global_batch_size,
            # The run's length ends it.
            num_epochs=None,
            on_damage=options.on_damage,
            cache_folder=options.cache_folder,
            cache_bytes=options.cache_gigabytes << 30,
            teaching=options.teaching,
            **options.kind.row_needs(options.method, options.served),
        )

    @cached_property
    def _vocabulary_map(self) -> VocabularyMap:
        assert self._training is not None, "the caller has read rows"
        return vocabulary_map(self._training)

    def _leave_out(self, batch: MicroBatch, row: int, segment: int, what: str) -> None:
        rows = self._validation if batch.of_validation else self._training
        assert rows is not None, "a reader of batches has opened its data"
        rows.leave_out(batch.run_positions[row], segment, what)

    def _guided(
        self,
        batches: Iterator[MicroBatch],
        num_microbatches: int,
        lookahead: int,
        bridge: StudentBridge | None,
        vp_stage: int | None,
    ) -> Iterator[MicroBatch]:
        """Add losses; a colocated teacher does so later."""
        virtual = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        if not parallel_state.is_pipeline_last_stage(**virtual):
            return batches
        if self._options.served.by == "stored":
            return map(self.guide.by_stored, batches)
        if not self._options.teacher.world_size:
            return batches
        asking = GuidedBatches(
            batches,
            bridge,
            num_microbatches=num_microbatches,
            guide=self.guide,
            group=parallel_state.get_tensor_and_context_parallel_group(),
            lookahead=lookahead,
        )
        self._asking.append(asking)
        return asking


def _load_micro_batches(
    rows: AlignedRows,
    micro_batch_size: int,
    *,
    consumed_samples: int,
    num_samples: int | None = None,
    num_workers: int,
    of_validation: bool = False,
) -> Iterator[MicroBatch]:
    num_replicas = parallel_state.get_data_parallel_world_size()
    loader = load_batches(
        rows,
        micro_batch_size=micro_batch_size,
        replica=parallel_state.get_data_parallel_rank(),
        num_replicas=num_replicas,
        consumed_samples=consumed_samples,
        num_samples=num_samples,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
    )
    device, share = torch.device("cuda"), own_share()
    first = consumed_samples // (micro_batch_size * num_replicas)
    for step, (batch, samples) in enumerate(zip(loader, loader.batches, strict=True)):
        yield micro_batch(
            batch,
            first + step,
            tuple(samples),
            device=device,
            share=share,
            of_validation=of_validation,
        )
