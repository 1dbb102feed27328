"""A student whose forward pass is its loss.

DistributedDataParallel, FSDP2, peft and torch.compile hook into a forward pass.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.command_line.failures import hinted
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.losses.cell_sums import Cells
from pipeline.losses.loss_result import LossResult
from pipeline.losses.spans import check_spans
from pipeline.methods import kind_of
from pipeline.methods.hf_pass import StudentPass, student_states
from pipeline.methods.kind import Served
from pipeline.methods.method import Method
from pipeline.scoring.teaching import ONLINE_TOP_K
from pipeline.streaming import AlignedRows, Rows
from pipeline.streaming.vocabularies import vocabulary_map
from schemas.distribution_rule import EntryShape


class GuidedStudent(nn.Module):
    """A causal language model and the method by which it learns.

    Attributes:
        model: the student, the only parameters; a model of transformers, or one of peft around it.
        method: makes the loss.
        group: the processes that choose tokens together if the method's scope is "group"; None:
            this process alone.
        vocab_size: tokens of the student's tokenizer, for kld; None: the models' rows.
        vocabulary_map: of the rows' two vocabularies, for distill.
        asked: entries of a running teacher's distributions (default: its 16 likeliest next tokens,
            the text's own, and 4 of the rest if the method uses those).
        cells: of the student's tokens, if the method compares cells.

    Example:
        >>> guided = GuidedStudent(student, Method("alm"))
        >>> loss = guided(batch, teacher=teacher)
        >>> (loss.loss_sum / loss.num_tokens.clamp_min(1)).backward()
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        group: dist.ProcessGroup | None = None,
        vocab_size: int | None = None,
        vocabulary_map: VocabularyMap | None = None,
        asked: EntryShape | None = None,
    ) -> None:
        """Wrap a student.

        ValueError for an unknown method, an adapter outside the student's layers, or distill
        without cells.
        """
        super().__init__()
        self.model = model
        self.method = method
        self.group = group
        self.vocab_size = vocab_size
        self.vocabulary_map = vocabulary_map
        uses_cells = kind_of(self.method).uses_cells(self.method)  # first: refuses other types
        self.asked = self.method.entries_of(ONLINE_TOP_K, None) if asked is None else asked
        self.cells = _cells_of(vocabulary_map) if uses_cells else None
        language_model(model)

    @classmethod
    def of_run(
        cls,
        model: nn.Module,
        method: Method,
        rows: AlignedRows,
        served: Served,
        group: dist.ProcessGroup | None,
    ) -> "GuidedStudent":
        """Wrap a run's student."""
        return cls(
            model,
            method,
            group=group,
            vocab_size=rows.manifest.student.vocab_size,
            vocabulary_map=vocabulary_map(rows) if served.with_distributions else None,
            asked=served.entries,
        )

    def forward(
        self, batch: Rows, *, teacher: PreTrainedModel | None = None, step: int = 0
    ) -> LossResult:
        """Return a batch's loss.

        Args:
            batch: rows of `pipeline.streaming`, on the model's device; with `teacher_losses` no
                teacher runs.
            teacher: frozen; an argument, so wrappers don't take it for a part of the student.
            step: of training, for random choices.
        """
        student, kind = language_model(self.model), kind_of(self.method)
        rule = kind.rule(self.method)
        in_group, host = rule.scope == "group", batch.host
        given = StudentPass(
            method=self.method,
            student=student,
            teacher=teacher,
            batch=batch,
            hidden=student_states(student, batch),
            rule=replace(rule, scope="microbatch") if in_group and self.group is None else rule,
            group=self.group if in_group else None,
            step=step,
            weight=kind.weight_of(self.method),
            vocab_size=self.vocab_size,
            with_distributions=kind.needs == "distributions",
            vocabulary_map=self.vocabulary_map,
            asked=self.asked,
            cells=self.cells,
            all_learn=kind.all_learn,
            # Checked only if that needs no wait for the device.
            widest_span=None
            if host is None
            else check_spans(host["teacher_input_ids"], host["teacher_spans"]),
        )
        result = kind.loss(given)
        by_source = losses_by_source(given.scores.losses.detach(), batch)
        return result._replace(metrics=result.metrics | by_source)


def _cells_of(known: VocabularyMap | None) -> Cells:
    if known is None or known.cells is None:
        error = ValueError(
            "method=distill compares sets of tokens, which are counted on the data: give "
            "vocabulary_map=vocabulary_map(rows)"
        )
        raise hinted(error, "vocabulary_map=vocabulary_map(rows)")
    return Cells.of(*known.cells)


def language_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a peft model, or the model itself.

    ValueError for an adapter outside the layers.
    """
    inner = cast(Any, model)
    if not hasattr(inner, "get_base_model"):
        return cast(PreTrainedModel, model)
    for name, adapter in inner.peft_config.items():
        if adapter.is_prompt_learning:
            raise ValueError(
                f"adapter {name!r} ({adapter.peft_type}) puts learned prompts before a text, but "
                "rows are packed: use an adapter that lies in the layers, such as LoRA"
            )
    return cast(PreTrainedModel, inner.get_base_model())


@torch.no_grad()
def losses_by_source(losses: Tensor, batch: Rows) -> dict[str, Tensor]:
    """Sum the student's losses by dataset of a mixture, over all labels, kept or not.

    `losses` are float [rows, seq_length], nats; metrics are named `student_loss/NAME`.
    """
    names = batch.layout.sources
    if not names:
        return {}
    counted = batch["loss_mask"].bool()
    sums = torch.where(counted, losses, 0.0).double().sum(-1)
    pairs = torch.stack((sums, counted.sum(-1).double()), -1)
    by_source = pairs.new_zeros(len(names), 2).index_add_(0, batch["source"].long(), pairs)
    return {f"student_loss/{name}": each for name, each in zip(names, by_source, strict=True)}
