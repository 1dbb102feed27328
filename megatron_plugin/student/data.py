"""A student rank's data: rows of both datasets, the loaders, and requests for losses."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from megatron_plugin import checks
from megatron_plugin.arguments import VocagOptions
from megatron_plugin.models.places import own_share
from megatron_plugin.student.batch import MicroBatch, Origin, micro_batch
from megatron_plugin.student.meeting import meet_before_steps
from megatron_plugin.student.requests import Connection, GuidedBatches, computes_loss
from megatron_plugin.student.run_identity import saved_stream
from megatron_plugin.upstream import parallel_state
from pipeline.packing.reading import parse_generation
from pipeline.packing.rules import Convention
from pipeline.streaming import AlignedRows, StreamConfig, load_batches
from schemas.manifest import Manifest

# Two global batches: one that is scored while one is computed, and one in hand.
_TRAINING_LOOKAHEAD, _VALIDATION_LOOKAHEAD = 2, 1


class StudentData:
    """The rows that a student rank trains and validates on, and their losses."""

    def __init__(self, options: VocagOptions, manifest: Manifest) -> None:
        """Note what to read; nothing is opened yet."""
        self._options = options
        self._manifest = manifest
        self._opened: dict[str, AlignedRows] = {}
        self._guided: list[GuidedBatches] = []

    def open_training(self, args: Namespace) -> AlignedRows:
        """Return the rows to train on, opened once for all of this rank's model chunks.

        Args:
            args: Megatron's.

        Raises:
            DatasetError: no finished dataset, or damage that is not to be quarantined.
            ValueError: rows that can't be made of it.
        """
        return self._open(self._options.data, args, args.global_batch_size)

    def training_batches(
        self, args: Namespace, num_samples: int, connection: Connection | None, vp_stage: int | None
    ) -> Iterator[MicroBatch]:
        """Return micro-batches from where the run stands to its last sample.

        Args:
            args: Megatron's.
            num_samples: of the run.
            connection: to the teacher's world; None where it has none.
            vp_stage: of the model chunk that reads them.
        """
        batches = load_micro_batches(
            self.open_training(args),
            args.micro_batch_size,
            consumed_samples=args.consumed_train_samples,
            num_samples=num_samples,
            num_workers=args.num_workers,
        )
        per_step = checks.step_sizes(args).training
        return self._guide(batches, per_step, _TRAINING_LOOKAHEAD, connection, vp_stage)

    def validation_batches(
        self, args: Namespace, connection: Connection | None, vp_stage: int | None
    ) -> Iterator[MicroBatch] | None:
        """Return endless micro-batches to validate on, None where nothing is validated."""
        path = self._options.validation_data
        if path is None or not args.eval_iters:
            return None
        rows = self._open(path, args, args.eval_global_batch_size)
        if rows.plan.num_rows is not None:
            raise ValueError(
                f"--vocag-validation-data {path} ends after {len(rows)} rows, but validation goes "
                "on: let one of its datasets repeat"
            )
        batches = load_micro_batches(
            rows,
            args.eval_micro_batch_size,
            consumed_samples=args.consumed_valid_samples,
            num_workers=args.num_workers,
        )
        per_step = checks.step_sizes(args).validation
        return self._guide(batches, per_step, _VALIDATION_LOOKAHEAD, connection, vp_stage)

    def drain(self) -> None:
        """Take the replies that are still on their way, so that the bridge can be closed."""
        for guided in self._guided:
            guided.drain()

    def _open(self, path: str, args: Namespace, global_batch_size: int) -> AlignedRows:
        options = self._options
        if path in self._opened:
            return self._opened[path]
        losses = options.stored_losses
        training = self._opened.get(options.data)
        if training is not None and training.teacher_rule is not None:
            # Of validation data the same teacher's, whatever names it: it is opened after.
            losses = training.teacher_rule.fingerprint
        self._opened[path] = AlignedRows(
            StreamConfig(
                path=path,
                seq_length=args.seq_length,
                # The training data decides for both, since the teacher has one length.
                teacher_seq_length=checks.teacher_seq_length(
                    options, self._manifest, args.seq_length
                ),
                **self._conventions(path),
                seed=args.seed,
                global_batch_size=global_batch_size,
                # Samples are numbers; the run's own length ends it.
                num_epochs=None,
                shuffle_shards=options.shuffle_shards,
                on_damage=options.on_damage,
                cache_folder=options.cache_folder,
                cache_bytes=options.cache_gigabytes << 30,
                stored_losses=losses,
                where=options.where if path == options.data else "",
                generation=parse_generation(options.generation) if path == options.data else None,
            ),
            saved_stream(args) if path == options.data else None,
        )
        return self._opened[path]

    def _conventions(self, path: str) -> dict[str, Any]:
        """Return the training data's conventions, whichever those of the validation data are."""
        options = self._options
        if path == options.data:
            # By their names, so that a mixture's datasets which have others are refused.
            names = ("student_bos", "student_eos", "teacher_context")
            return {name: getattr(options, name) for name in names}
        return {
            "student": Convention.of_tokenizer(self._manifest.student, ends=True),
            "teacher": Convention.of_tokenizer(self._manifest.teacher, ends=False),
        }

    def _guide(
        self,
        batches: Iterator[MicroBatch],
        num_microbatches: int,
        lookahead: int,
        connection: Connection | None,
        vp_stage: int | None,
    ) -> Iterator[MicroBatch]:
        """Give micro-batches their losses, stored or asked for; a colocated teacher does later."""
        how = self._options.aggregation
        if self._options.stored_losses is not None and computes_loss(vp_stage):
            return (batch.guided_by_stored(how) for batch in batches)
        if connection is None:
            return batches
        meeting = connection.meeting
        if not computes_loss():
            first = vp_stage in (None, 0)  # one chunk's batches wait for all of the rank's
            return meet_before_steps(batches, meeting, num_microbatches) if first else batches
        if not computes_loss(vp_stage):
            return batches
        guided = GuidedBatches(
            batches,
            connection.bridge,
            num_microbatches=num_microbatches,
            how=how,
            group=parallel_state.get_tensor_and_context_parallel_group(),
            lookahead=lookahead,
            meet=meeting.wait,
        )
        self._guided.append(guided)
        return guided


def load_micro_batches(
    rows: AlignedRows,
    micro_batch_size: int,
    *,
    consumed_samples: int,
    num_samples: int | None = None,
    num_workers: int = 0,
) -> Iterator[MicroBatch]:
    """Read this replica's micro-batches, onto the device, from where a run stands.

    Args:
        rows: of a dataset.
        micro_batch_size: rows of each.
        consumed_samples: that the run has read.
        num_samples: of the run; None: endless.
        num_workers: processes that read ahead.
    """
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
    device = torch.device("cuda")
    first = consumed_samples // (micro_batch_size * num_replicas)
    share = own_share()
    return (
        micro_batch(batch, first + step, device, origin=Origin(rows, tuple(samples)), share=share)
        for step, (batch, samples) in enumerate(zip(loader, loader.batches, strict=True))
    )
