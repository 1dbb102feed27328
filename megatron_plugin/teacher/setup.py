"""Load the teacher that the options name, and check that it is one."""

from __future__ import annotations

import logging

import torch
from torch import distributed as dist

from megatron_plugin import checks
from megatron_plugin.arguments import TeacherOptions
from megatron_plugin.models.build import Precision, describe_layers
from megatron_plugin.models.shape import ModelShape
from megatron_plugin.models.stage_cut import cut_layers, efficiency, output_cost, require_cut
from megatron_plugin.models.weights import open_weights
from megatron_plugin.teacher.model import Teacher
from megatron_plugin.upstream import parallel_state
from pipeline.models.probe import probe_tokens, require_trained
from pipeline.packing.opening import open_run
from pipeline.packing.reading import Reading
from pipeline.packing.rules import Convention
from schemas.manifest import Manifest

logger = logging.getLogger(__name__)


def load_teacher(
    options: TeacherOptions,
    manifest: Manifest,
    *,
    data: str,
    seq_length: int,
    device: torch.device,
    allow_untrained: bool,
    accepted_by: str = "--vocag-allow-untrained-teacher",
) -> Teacher:
    """Return this rank's part of the teacher, on the groups of `parallel_state`.

    Args:
        options: which teacher.
        manifest: the dataset's.
        data: the dataset, whose own copy of the tokenizer reads the probe text.
        seq_length: teacher tokens per row.
        device: of the model.
        allow_untrained: accept a teacher that predicts no better than chance.
        accepted_by: the command's option that accepts an untrained teacher.

    Raises:
        ValueError: it doesn't fit the dataset or these ranks.
        UntrainedTeacherError: its weights did not load.
    """
    weights = open_weights(options.name)
    checks.require_teacher(
        weights.shape, weights.folder, manifest, data=data, seq_length=seq_length
    )
    weights.shape.require_tensor_parallel(
        parallel_state.get_tensor_model_parallel_world_size(), what="teacher"
    )
    weights.shape.require_expert_parallel(
        parallel_state.get_expert_model_parallel_world_size(), what="teacher"
    )
    precision = Precision(getattr(torch, options.dtype))
    if dist.get_rank() == 0:
        logger.info("the teacher: %s", describe_layers("local", precision.dtype))
    teacher = Teacher(
        weights,
        precision,
        seq_length=seq_length,
        micro_batch_size=options.micro_batch_size,
        device=device,
        layers_per_stage=_cut(options, weights.shape),
    )
    if not allow_untrained:
        mean = teacher.mean_loss(_probe_row(data, manifest))
        if mean is not None:
            require_trained(mean, weights.shape.vocab_size, accepted_by=accepted_by)
    return teacher


def _cut(options: TeacherOptions, shape: ModelShape) -> tuple[int, ...]:
    """Return the layers of each pipeline stage; say them once."""
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    output = output_cost(shape)
    layers = options.layers_per_stage or cut_layers(shape.num_layers, num_stages, output)
    require_cut(layers, num_layers=shape.num_layers, num_stages=num_stages)
    if num_stages > 1 and dist.get_rank() == 0:
        logger.info(
            "the teacher's pipeline: %s layers per stage, the output layer as %.1f layers on the "
            "last; %.0f %% efficient when full",
            ",".join(map(str, layers)),
            output,
            100 * efficiency(layers, output),
        )
    return layers


def _probe_row(data: str, manifest: Manifest) -> list[int]:
    """Return the probe text as a row holds it, with what stands before a text."""
    context = Convention.of_tokenizer(manifest.teacher, ends=False).first_token_id
    text = probe_tokens(open_run(Reading(path=data)).dataset)
    return text if context is None else [context, *text]
