"""Load the teacher that the options name, and check that it is one."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from megatron_plugin import checks
from megatron_plugin.arguments import TeacherOptions
from megatron_plugin.bridge import TeacherRows
from megatron_plugin.models import Precision
from megatron_plugin.teacher import PROBE_TEXT, Teacher, check_trained
from megatron_plugin.weight_sources import open_weights
from pipeline.dataset_files import open_dataset
from pipeline.dataset_tokenizers import load_dataset_tokenizers
from pipeline.packing import Convention
from schemas.manifest import Manifest

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
    weights.shape.require_parallel(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        what="teacher",
    )
    teacher = Teacher(
        weights,
        Precision(_DTYPES[options.dtype]),
        seq_length=seq_length,
        micro_batch_size=options.micro_batch_size,
        device=device,
    )
    if not options.allow_untrained:
        probe = _probe_rows(data, manifest, seq_length, options.micro_batch_size)
        check_trained(teacher, probe, weights.shape.vocab_size)
    return teacher


def _probe_rows(data: str, manifest: Manifest, seq_length: int, num_rows: int) -> TeacherRows:
    """Return rows that hold the probe text and end with it."""
    tokenizers = load_dataset_tokenizers(open_dataset(data).root, manifest)
    batch = tokenizers.teacher.tokenize_batch([PROBE_TEXT.encode()])
    context = Convention.of_tokenizer(manifest.teacher, ends=False).first_token_id
    ids = [token for token in (context, *batch.input_ids.tolist()) if token is not None]
    ids = ids[:seq_length]
    row = torch.zeros(seq_length, dtype=torch.int32)
    row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    # What follows the text is a document of one-token documents: none has a loss.
    bounds = torch.arange(len(ids), seq_length + 1, dtype=torch.int32)
    bounds = torch.cat((torch.zeros(1, dtype=torch.int32), bounds))
    return TeacherRows(row.repeat(num_rows, 1), bounds.repeat(num_rows, 1))
