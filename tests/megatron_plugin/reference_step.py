"""One training step in one process with transformers: what every layout must agree with.

Documents go through the models one by one; nothing of the plugin is used.
"""

from functools import cache
from itertools import pairwise

import torch
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from pipeline.guidance import SelectionRule, aggregate_teacher_losses, guided_loss, select_tokens
from pipeline.models.hf_models import load_language_model
from pipeline.packing.rules import suggest_teacher_seq_length
from pipeline.streaming import AlignedRows, Reading, StreamConfig, load_batches
from pipeline.training.config import TrainConfig
from pipeline.training.guided import GuidedStudent
from pipeline.training.loop import Run, train_step
from pipeline.training.method import Method
from pipeline.training.ranks import Ranks
from tests.megatron_plugin.training_job import GLOBAL_BATCH, MICRO_BATCH, SEED, SEQ_LENGTH


@cache
def reference_step(inputs, rows_per_choice=MICRO_BATCH, *, selector="teacher", unmapped="include"):
    """Return a job's first gradients by parameter name, and its loss.

    Args:
        inputs: the job's.
        rows_per_choice: rows over which the top fraction is counted: the micro-batches of all
            replicas.
        selector: what tokens are ranked by.
        unmapped: what happens to tokens without guidance.
    """
    data = Reading(str(inputs.data))
    rows = AlignedRows(
        StreamConfig(data, seq_length=SEQ_LENGTH, seed=SEED, global_batch_size=GLOBAL_BATCH)
    )
    assert rows.rules.teacher_seq_length == suggest_teacher_seq_length(rows.manifest, SEQ_LENGTH)
    student = AutoModelForCausalLM.from_pretrained(inputs.student, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(inputs.teacher, dtype=torch.float32)
    total, count = 0.0, 0
    for start in range(0, GLOBAL_BATCH, rows_per_choice):
        batch = rows.__getitems__(list(range(start, start + rows_per_choice)))
        result = _guided(student, teacher, batch, SelectionRule(selector, unmapped=unmapped))
        total, count = total + result.loss_sum, count + int(result.num_tokens)
    (total / count).backward()
    return {name: p.grad for name, p in student.named_parameters()}, float(total.detach() / count)


def reference_gradients(*given, **named):
    """Return the gradients of `reference_step`."""
    return reference_step(*given, **named)[0]


def plain_trainer_gradients(inputs, **method):
    """Return the gradients of the first step of the plain trainer, on Megatron's rows."""
    config = TrainConfig(
        data=Reading(str(inputs.data)),
        student=str(inputs.student),
        teacher=str(inputs.teacher),
        output=inputs.data / "unused",
        method=Method(**method),
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        seed=SEED,
        clip_norm=1e9,
    )
    rows = AlignedRows(config.stream)
    student, teacher = (load_language_model(folder) for folder in (config.student, config.teacher))
    run = Run(
        config,
        Ranks(torch.device("cpu")),
        rows,
        student,
        GuidedStudent(student, config.method),
        teacher,
        Unmoved(student.parameters()),
    )
    train_step(run, iter(load_batches(rows, micro_batch_size=MICRO_BATCH)), 0)
    return {name: parameter.grad for name, parameter in student.named_parameters()}


class Unmoved(torch.optim.SGD):
    """Leaves weights and gradients as they are."""

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass


def document_losses(model, input_ids, labels, cu_seqlens):
    """Return fp32 [rows, seq_length] losses and entropies, each document run by itself."""
    losses, entropies = [], []
    for ids, targets, bounds in zip(input_ids, labels, cu_seqlens.tolist(), strict=True):
        row = []
        for start, stop in pairwise(bounds):
            if start < stop:
                logits = model(ids[None, start:stop].long()).logits[0]
                row.append((logits, targets[start:stop].long()))
        losses.append(torch.cat([cross_entropy(*pair, reduction="none") for pair in row]))
        entropies.append(torch.cat([Categorical(logits=pair[0]).entropy() for pair in row]))
    return torch.stack(losses), torch.stack(entropies)


def _guided(student, teacher, batch, rule):
    with torch.no_grad():
        labels = batch["teacher_input_ids"].roll(-1, 1)
        ahead, _ = document_losses(
            teacher, batch["teacher_input_ids"], labels, batch["teacher_cu_seqlens"]
        )
        # Entry l is the loss of token l, which position l - 1 predicts.
        teacher_losses = torch.cat((torch.full((len(ahead), 1), torch.nan), ahead[:, :-1]), 1)
        teacher_losses[batch["teacher_position_ids"] == 0] = torch.nan
    losses, entropies = document_losses(
        student, batch["input_ids"], batch["labels"], batch["cu_seqlens"]
    )
    guidance = aggregate_teacher_losses(teacher_losses, batch["teacher_spans"], "max")
    selection = select_tokens(
        losses,
        guidance,
        loss_mask=batch["loss_mask"],
        rule=rule,
        teacher_losses=_of_text(teacher_losses, batch),
        student_entropies=entropies,
    )
    return guided_loss(losses, selection)


def _of_text(teacher_losses, batch):
    """Return the losses without those of padding, which is the last segment, of ids 0."""
    of_text = torch.full_like(teacher_losses, torch.nan)
    for row, ids in enumerate(batch["teacher_input_ids"]):
        stop = int(ids.nonzero().max()) + 1
        of_text[row, :stop] = teacher_losses[row, :stop]
    return of_text
