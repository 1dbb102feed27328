"""A micro-batch's loss by each method."""

from dataclasses import replace

import torch.distributed as dist
from transformers import PreTrainedModel

from pipeline.guidance import LossResult
from pipeline.models.output_layer import output_layer
from pipeline.streaming import Rows
from pipeline.training.method import Method
from pipeline.training.methods import METHODS
from pipeline.training.sources import losses_by_source
from pipeline.training.student_pass import StudentPass, score_labels, student_states


def batch_loss(
    method: Method,
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batch: Rows,
    step: int,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> LossResult:
    """Run the student, and the teacher if the method needs it, over a micro-batch.

    Args:
        method: what to compute.
        student: trained.
        teacher: frozen; None where the method runs none, or rows hold its losses.
        batch: rows of `pipeline.streaming`, on the models' device.
        step: of training; random choices are drawn anew for each.
        group: the processes that choose together where the method's scope is "group"; None: this
            one alone, whose micro-batch is then the group's.
        vocab_size: of the tokenizer that kld's models share; their further rows are padding.

    Example:
        >>> batch_loss(Method("full"), student, None, batch, 0).loss_sum.backward()
    """
    kind = METHODS[method.name]
    rule, hidden = kind.rule(method), student_states(student, batch)
    scores = score_labels(hidden, output_layer(student), batch, with_entropy=rule.ranks_by_entropy)
    alone = rule.scope == "group" and group is None
    given = StudentPass(
        method=method,
        student=student,
        teacher=teacher,
        batch=batch,
        hidden=hidden,
        scores=scores,
        rule=replace(rule, scope="microbatch") if alone else rule,
        group=group if rule.scope == "group" else None,
        step=step,
        weight=kind.weight if method.weight is None else method.weight,
        vocab_size=vocab_size,
    )
    result = kind.loss(given)
    by_source = losses_by_source(scores.losses.detach(), batch)
    return result._replace(metrics=result.metrics | by_source)
