"""The frozen teacher: losses of its own tokens, forward only, without whole logits.

Expert-parallel ranks are one replica: they share experts and score different rows in step.

Dimensions: b rows of a micro-batch, o places of a row on this rank, v values of a place.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from megatron_plugin.bridge import TeacherAnswer, TeacherRows
from megatron_plugin.models.attention import row_segments
from megatron_plugin.models.build import build_frozen_model
from megatron_plugin.models.copies import to_device
from megatron_plugin.models.label_scores import score_labels, score_next_tokens
from megatron_plugin.models.places import gather_places, own_share
from megatron_plugin.models.weight_sources import Weights
from megatron_plugin.upstream import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
    parallel_state,
)
from pipeline.losses.spans import has_context
from pipeline.losses.tail import TailDraws, row_draw_keys
from schemas.distribution_rule import NO_ENTRIES, EntryShape


class Teacher:
    """A teacher on the groups of `parallel_state`; all its ranks make the same calls."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        *,
        seq_length: int,
        micro_batch_size: int,
        device: torch.device,
        asked: EntryShape = NO_ENTRIES,
        num_ids: int | None = None,
    ) -> None:
        """Load this rank's part of the model, with weights and activations of `dtype`.

        It answers with `asked` entries below `num_ids`, None: any row of the output layer; draws
        equal those of `vocag score` with its default seed.
        """
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self._asked, self._num_ids = asked, num_ids
        self._device = device
        self._share = own_share()
        # Ranks that share rows cut them into equal parts; padding has no losses.
        parts = 2 * self._share.size if self._share.size > 1 else 1
        if weights.shape.experts is not None:  # sequence-parallel, see `build`
            parts *= parallel_state.get_tensor_model_parallel_world_size()
        self._num_places = -(-seq_length // parts) * parts
        self._vocab_size = weights.shape.vocab_size
        self._model = build_frozen_model(weights, dtype, device=device)

    def score(self, rows: TeacherRows) -> TeacherAnswer | None:
        """Return each token's loss, `-log P(x_l | x_<l)` within its document, and asked entries.

        The answer is on the last pipeline stage's device, None elsewhere. ValueError unless
        micro-batches divide the rows, which share one pass.
        """
        if len(rows) % self.micro_batch_size:
            raise ValueError(
                f"{len(rows)} rows aren't a multiple of --vocag-teacher-micro-batch-size "
                f"{self.micro_batch_size}: choose one that divides the rows of a step"
            )
        own = _own_rows(rows, self.micro_batch_size)
        num_microbatches = len(own) // self.micro_batch_size
        parts = (own.share(part, num_microbatches) for part in range(num_microbatches))
        values = self._forward(parts, num_microbatches)
        return TeacherAnswer(_all_rows(torch.cat(values), len(rows))) if values else None

    def mean_loss(self, tokens: Sequence[int]) -> float | None:
        """Return the mean loss of a text's first row; None before the last pipeline stage."""
        count = min(len(tokens), self.seq_length)
        row = torch.zeros(self.seq_length, dtype=torch.int32)
        row[:count] = torch.tensor(tokens[:count], dtype=torch.int32)
        bounds = torch.tensor([0, count, self.seq_length], dtype=torch.int32)
        num_rows = self.micro_batch_size
        answer = self.score(TeacherRows(row.repeat(num_rows, 1), bounds.repeat(num_rows, 1)))
        return None if answer is None else float(answer.losses[0, :count].nanmean())

    @torch.no_grad()
    def _forward(self, parts: Iterator[TeacherRows], num_microbatches: int) -> list[Tensor]:
        pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
        schedule = (
            forward_backward_pipelining_without_interleaving
            if pipelined
            else forward_backward_no_pipelining
        )
        values: list[Tensor] = schedule(
            forward_step_func=self._forward_step,
            data_iterator=parts,
            model=[self._model],
            num_microbatches=num_microbatches,
            seq_length=self._num_places,
            micro_batch_size=self.micro_batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        return values

    def _forward_step(
        self, parts: Iterator[TeacherRows], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Tensor]]:
        part, take = next(parts), self._share.take
        padding = self._num_places - self.seq_length
        tokens = pad(to_device(part.input_ids, self._device).long(), (0, padding))
        cu_seqlens = pad(part.cu_seqlens, (0, 1), value=self._num_places)
        segments = row_segments(cu_seqlens, self._num_places, self._device, self._share)
        mask = to_device(has_context(part.cu_seqlens, self.seq_length), self._device)
        # A row's last place predicts nothing.
        labels, mask = pad(tokens[:, 1:], (0, 1)), pad(mask[:, 1:], (0, padding + 1))
        places = torch.arange(self._num_places, device=self._device).expand_as(tokens)
        tail = None
        if self._asked.width:  # also without draws
            keys = pad(row_draw_keys(part.input_ids, part.cu_seqlens), (0, 0, 0, padding))
            own = to_device(take(keys).transpose(0, 1).flatten(0, 1), self._device)
            tail = TailDraws(own, self._asked.drawn)
        output = model(
            take(tokens),
            take(places),
            None,
            packed_seq_params=segments,
            output_processor=partial(
                _values_ahead,
                *(take(labels), take(mask), self._vocab_size),
                *(self._asked.exact - 1, self._num_ids, tail),
            ),
        )
        return output, self._collect

    def _collect(self, ahead_bov: Tensor, non_loss_data: bool = True) -> Tensor:
        """Return the values of `TeacherAnswer`; place l - 1 knows the loss of token l."""
        group = parallel_state.get_context_parallel_group()
        ahead = gather_places(ahead_bov.transpose(0, 1), group).transpose(0, 1)
        losses = pad(ahead[:, :-1, :1], (0, 0, 1, 0), value=torch.nan)
        return torch.cat((losses, ahead[..., 1:]), -1)[:, : self.seq_length]


def num_expert_ranks() -> int:
    """Return the number of ranks that share a replica's experts."""
    size: int = parallel_state.get_expert_model_parallel_world_size()
    return size


def _own_rows(rows: TeacherRows, micro_batch_size: int) -> TeacherRows:
    """Return an expert-parallel rank's rows; the last row fills equal parts."""
    ranks = num_expert_ranks()
    if ranks == 1:
        return rows
    missing = -len(rows) % (ranks * micro_batch_size)
    filled = torch.arange(len(rows) + missing).clamp_max(len(rows) - 1)
    together = TeacherRows(rows.input_ids[filled], rows.cu_seqlens[filled])
    return together.share(parallel_state.get_expert_model_parallel_rank(), ranks)


def _all_rows(own: Tensor, num_rows: int) -> Tensor:
    if num_expert_ranks() == 1:
        return own
    group = parallel_state.get_expert_model_parallel_group()
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own.contiguous(), group=group)
    return torch.cat(gathered)[:num_rows]


def _values_ahead(
    labels_bo: Tensor,
    mask_bo: Tensor,
    vocab_size: int,
    top_k: int,
    num_ids: int | None,
    tail: TailDraws | None,
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    **_: Any,
) -> Tensor:
    """Return values for each place's label and next tokens, as GPTModel's output processor.

    They are fp32 [b, o, 1 + 2 K] as in `TeacherAnswer`, NaN for masked losses.
    """
    layer = hidden_states, output_layer, output_weight
    labels_ob, mask_ob = labels_bo.transpose(0, 1), mask_bo.transpose(0, 1)
    if tail is not None:
        next_ob = labels_ob.where(mask_ob, -1)  # a token of another document may be drawn
        losses, *others = score_next_tokens(
            *layer, next_ob, top_k, vocab_size=vocab_size, num_ids=num_ids, tail=tail
        )
    else:
        found = score_labels(*layer, labels_ob, vocab_size=vocab_size, loss_mask_ob=mask_ob)
        losses, others = found.losses, []
    losses = losses.masked_fill(~mask_ob, torch.nan)
    values = torch.cat((losses.unsqueeze(-1), *(each.float() for each in others)), -1)
    return values.transpose(0, 1).contiguous()
