"""Load the named teacher, and check it."""

from argparse import Namespace
from pathlib import Path

import torch

from megatron_plugin import checks
from megatron_plugin.arguments import VocagOptions, naming_arguments
from megatron_plugin.models.shape import ModelShape
from megatron_plugin.models.weight_sources import open_weights
from megatron_plugin.teacher.model import Teacher
from megatron_plugin.upstream import parallel_state
from pipeline.models.fit import require_room, require_tokenizer
from pipeline.models.probe import probe_tokens, require_trained
from pipeline.packing.opening import OpenedRun


@naming_arguments()
def load_teacher(options: VocagOptions, opened: OpenedRun, args: Namespace) -> Teacher:
    """Return this rank's part of the teacher, on the groups of `parallel_state`.

    ValueError if it doesn't fit the run's data or ranks; UntrainedTeacherError if its weights did
    not load.
    """
    seq_length = checks.teacher_seq_length(options, opened.manifest, args.seq_length)
    assert options.teaching.teacher is not None
    weights = open_weights(options.teaching.teacher)
    require_fit(weights.shape, weights.files.path, opened, seq_length=seq_length)
    weights.shape.require_parallel(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
    )
    teacher = Teacher(
        weights,
        getattr(torch, options.teacher.dtype),
        seq_length=seq_length,
        micro_batch_size=options.teacher.micro_batch_size,
        device=torch.device("cuda"),
        asked=options.served.entries,
        num_ids=opened.manifest.teacher.vocab_size,
    )
    if not options.allow_untrained_teacher:
        mean = teacher.mean_loss(_probe_row(opened))
        if mean is not None:
            require_trained(mean, weights.shape.vocab_size)
    return teacher


def require_fit(shape: ModelShape, folder: Path, opened: OpenedRun, *, seq_length: int) -> None:
    """Check that a teacher fits the run's rows, of `seq_length` teacher tokens.

    ValueError for vocabulary or length, ForeignTokenizerError for another tokenizer.
    """
    require_room(
        opened,
        str(folder),
        side="teacher",
        vocab_size=shape.vocab_size,
        seq_length=seq_length,
        max_length=shape.max_position_embeddings,
        remedy="lower --seq-length or the teacher's",
    )
    shape.require_window(seq_length, what="teacher")
    require_tokenizer(folder, opened.dataset, side="teacher")


def _probe_row(opened: OpenedRun) -> list[int]:
    context = opened.manifest.teacher.around_text.first_token_id
    text = probe_tokens(opened.dataset)
    return text if context is None else [context, *text]
