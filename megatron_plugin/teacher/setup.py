"""Load the teacher that the options name, and check that it is one."""

from __future__ import annotations

import torch

from megatron_plugin import checks
from megatron_plugin.arguments import TeacherOptions
from megatron_plugin.models.weights import open_weights
from megatron_plugin.teacher.model import Teacher
from megatron_plugin.upstream import parallel_state
from pipeline.models.probe import probe_tokens, require_trained
from pipeline.packing.opening import OpenedRun


def load_teacher(
    options: TeacherOptions,
    opened: OpenedRun,
    *,
    seq_length: int,
    allow_untrained: bool,
) -> Teacher:
    """Return this rank's part of the teacher, on the groups of `parallel_state`.

    Args:
        options: which teacher.
        opened: what the run reads.
        seq_length: teacher tokens per row.
        allow_untrained: accept a teacher that predicts no better than chance.

    Raises:
        ValueError: it doesn't fit the dataset or these ranks.
        UntrainedTeacherError: its weights did not load.
    """
    weights = open_weights(options.name)
    checks.require_teacher(weights.shape, weights.files.path, opened, seq_length=seq_length)
    weights.shape.require_parallel(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
    )
    teacher = Teacher(
        weights,
        getattr(torch, options.dtype),
        seq_length=seq_length,
        micro_batch_size=options.micro_batch_size,
        device=torch.device("cuda"),
    )
    if not allow_untrained:
        mean = teacher.mean_loss(_probe_row(opened))
        if mean is not None:
            option = "--vocag-allow-untrained-teacher"
            require_trained(mean, weights.shape.vocab_size, accepted_by=option)
    return teacher


def _probe_row(opened: OpenedRun) -> list[int]:
    """Return the probe text as a row holds it, with what stands before a text."""
    context = opened.manifest.teacher.around_text.first_token_id
    text = probe_tokens(opened.dataset)
    return text if context is None else [context, *text]
