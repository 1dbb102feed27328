"""One training step of `vocag train` in one process: what every layout must agree with.

`tests/pipeline/training` holds it against slow counts over documents.
"""

from functools import cache
from itertools import pairwise

import torch
from torch.nn.functional import cross_entropy

from pipeline.methods import kind_of
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, load_batches
from pipeline.training.config import TrainConfig
from pipeline.training.guided import GuidedStudent
from pipeline.training.loop import Run, train_step
from pipeline.training.ranks import Ranks
from pipeline.training.run_opening import OpenedTraining
from tests.megatron_plugin.training_job import GLOBAL_BATCH, MICRO_BATCH, SEED, SEQ_LENGTH


@cache
def reference_step(inputs, rows_per_choice=MICRO_BATCH, **method):
    """Return a job's first gradients by parameter name, and its loss.

    The top fraction is counted over `rows_per_choice`: the micro-batches of all replicas.
    """
    asked = {"top_k": method.pop("top_k", None), "draws": method.pop("draws", 0)}
    chosen = Method(**{"name": "teacher"} | method)
    teacher = None if kind_of(chosen).needs == "nothing" else str(inputs.teacher)
    config = TrainConfig(
        data=Reading(str(inputs.data)),
        student=str(inputs.student),
        teaching=Teaching(teacher, **asked),
        output=inputs.data / "unused",
        method=chosen,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=rows_per_choice,
        seed=SEED,
        clip_norm=1e9,
    )
    rows, student = AlignedRows(config.stream), load_language_model(config.student)
    opened = OpenedTraining(
        rows,
        GuidedStudent.of_run(student, chosen, rows, config.served, None),
        None if teacher is None else load_language_model(teacher),
    )
    unmoved = Unmoved(student.parameters())
    run = Run(config, Ranks(torch.device("cpu")), opened, opened.guided, unmoved)
    done = train_step(run, iter(load_batches(rows, micro_batch_size=rows_per_choice)), 0)
    return {name: parameter.grad for name, parameter in student.named_parameters()}, done["loss"]


def reference_gradients(*given, **named):
    return reference_step(*given, **named)[0]


class Unmoved(torch.optim.SGD):
    """Leaves weights and gradients as they are."""

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass


def document_losses(model, input_ids, labels, cu_seqlens):
    """Return fp32 [rows, seq_length] losses, each document run by itself."""
    losses = []
    for ids, targets, bounds in zip(input_ids, labels, cu_seqlens.tolist(), strict=True):
        for start, stop in pairwise(bounds):
            if start < stop:
                logits = model(ids[None, start:stop].long()).logits[0]
                losses.append(cross_entropy(logits, targets[start:stop].long(), reduction="none"))
    return torch.cat(losses).view(input_ids.shape)
