"""Load the teacher that the options name, and check that it is one."""

from __future__ import annotations

import logging

import torch
from megatron.core import parallel_state
from torch import distributed as dist

from megatron_plugin import checks
from megatron_plugin.arguments import TeacherOptions
from megatron_plugin.models.build import Precision
from megatron_plugin.models.shape import ModelShape
from megatron_plugin.models.stage_cut import cut_layers, efficiency, output_cost, require_cut
from megatron_plugin.models.weights import open_weights
from megatron_plugin.teacher.model import PROBE_TEXT, Teacher, check_trained
from pipeline.dataset.files import open_dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizers
from pipeline.packing.rules import Convention
from schemas.manifest import Manifest

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_teacher(
    options: TeacherOptions,
    manifest: Manifest,
    *,
    data: str,
    seq_length: int,
    device: torch.device,
) -> Teacher:
    """Return this rank's part of the teacher, on the groups of `parallel_state`.

    Args:
        options: which teacher.
        manifest: the dataset's.
        data: the dataset, whose own copy of the tokenizer reads the probe text.
        seq_length: teacher tokens per row.
        device: of the model.

    Raises:
        ValueError: it doesn't fit the dataset or these ranks.
        UntrainedTeacherError: its weights did not load.
    """
    weights = open_weights(options.source)
    checks.require_teacher(weights.shape, weights.folder, manifest, seq_length=seq_length)
    weights.shape.require_tensor_parallel(
        parallel_state.get_tensor_model_parallel_world_size(), what="teacher"
    )
    teacher = Teacher(
        weights,
        Precision(_DTYPES[options.dtype]),
        seq_length=seq_length,
        micro_batch_size=options.micro_batch_size,
        device=device,
        layers_per_stage=_cut(options, weights.shape),
    )
    if not options.allow_untrained:
        check_trained(teacher, _probe_tokens(data, manifest), weights.shape.vocab_size)
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


def _probe_tokens(data: str, manifest: Manifest) -> list[int]:
    """Return the probe text in the dataset's own teacher tokens."""
    tokenizers = load_dataset_tokenizers(open_dataset(data).location, manifest)
    batch = tokenizers.teacher.tokenize_batch([PROBE_TEXT.encode()])
    context = Convention.of_tokenizer(manifest.teacher, ends=False).first_token_id
    return [token for token in (context, *batch.input_ids.tolist()) if token is not None]
