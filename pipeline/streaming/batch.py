"""Rows as named tensors over one buffer, which processes pass as one tensor."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from pipeline.losses.spans import has_context
from pipeline.streaming.layout import FLOAT_FIELDS, RowLayout


class Rows(Mapping[str, torch.Tensor]):
    """One row or a batch of rows: a mapping of tensors that all lie in one.

    Fields, for B rows (without B for one row):
        input_ids, labels, position_ids: int32 [B, seq_length]; `labels[t]` is `input_ids[t + 1]`
            within a segment.
        loss_mask: float32 [B, seq_length], 1 where a label is learned, 0 at padding and at a
            segment's last token.
        teacher_spans: int32 [B, seq_length, 2], the half-open range of the row's teacher tokens
            that cover the label; (0, 0) for end tokens, padding and uncovered labels.
        teacher_input_ids, teacher_position_ids: int32 [B, teacher_seq_length]. A token at position
            0 has no context and no loss.
        cu_seqlens, teacher_cu_seqlens: int32 [B, max_segments + 2], bounds of segments, padding
            being the last; filled up with the row's length.
        num_quarantined_tokens: int32 [B], student tokens masked because their sample is damaged.
        teacher_losses: float32 [B, teacher_seq_length], nats, NaN without a loss; only with
            `Teaching.stored_losses`.
        next_token_ids: int32 [B, seq_length, K], the student's tokens that the teacher expects in
            place of each label, -1 for none; a label without a distribution has -1 first. The K
            columns, `layout.entries`, are exact ones, of each teacher by falling mass, then drawn
            ones, which may repeat. Only with `StreamConfig.with_distributions`, like the next two.
        next_token_probs: float32 [B, seq_length, K], their mass; other tokens share the rest.
        own_token_ids: int32 [B, seq_length], the student's token for what is left of the text's own
            teacher token, -1 for none: its mass is the label's if both are in one cell
            (`vocabulary_map(rows).cells`).
        source: int32 [B], the dataset's place in `layout.sources`; only in a mixture.
    """

    def __init__(self, buffer: torch.Tensor, layout: RowLayout, host: "Rows | None" = None) -> None:
        """View `buffer`, int32 [..., layout.num_words], a copy of `host`."""
        self.buffer = buffer
        self.layout = layout
        self._host = host

    @property
    def host(self) -> "Rows | None":
        """The same rows in host memory; None if unknown."""
        return self if self.buffer.device.type == "cpu" else self._host

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.layout.shapes.get(name)
        if shape is None:
            raise KeyError(
                f"no field {name!r} but {', '.join(self)}; a DataLoader needs "
                "collate_fn=vocag.collate_rows"
            )
        words = self.buffer[..., self.layout.words[name]]
        if name in FLOAT_FIELDS:
            words = words.view(torch.float32)
        return words.view((*words.shape[:-1], *shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        return len(self.layout.shapes)

    @property
    def student_is_text(self) -> torch.Tensor:
        """Places in segments that the student learns from, bool [B, seq_length].

        Padding and damaged samples are excluded.
        """
        return self._is_text("cu_seqlens", self.layout.seq_length)

    @property
    def teacher_is_text(self) -> torch.Tensor:
        """The same segments' teacher tokens, bool [B, teacher_seq_length]."""
        return self._is_text("teacher_cu_seqlens", self.layout.teacher_seq_length)

    @property
    def teacher_has_loss(self) -> torch.Tensor:
        """Teacher tokens with a loss, bool [B, teacher_seq_length].

        They have a context, or a stored loss, in a segment that the student learns from; a chat's
        also map to a learned label.
        """
        if "teacher_losses" in self.layout.shapes:
            known = ~self["teacher_losses"].isnan()
        else:
            known = has_context(self["teacher_cu_seqlens"], self.layout.teacher_seq_length)
        if self.layout.of_chats:
            known = known & self._is_taught()
        return known & self.teacher_is_text

    def _is_taught(self) -> torch.Tensor:
        spans, learned = self["teacher_spans"], (self["loss_mask"] > 0).int()
        shape = (*spans.shape[:-2], self.layout.teacher_seq_length + 1)
        changes = torch.zeros(shape, dtype=torch.int32, device=spans.device)
        changes.scatter_add_(-1, spans[..., 0].long(), learned)
        changes.scatter_add_(-1, spans[..., 1].long(), -learned)
        return changes.cumsum(-1)[..., :-1] > 0

    def _is_text(self, bounds: str, seq_length: int) -> torch.Tensor:
        learned = self["loss_mask"].long()
        segments = _segments(self["cu_seqlens"], learned.shape[-1])
        counts = torch.zeros_like(self["cu_seqlens"], dtype=torch.int64)
        counts.scatter_add_(-1, segments, learned)
        return counts.gather(-1, _segments(self[bounds], seq_length)) > 0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Rows":
        """Return a copy on a device, moved as one tensor."""
        return Rows(self.buffer.to(device, non_blocking=non_blocking), self.layout, self.host)

    def pin_memory(self) -> "Rows":
        """Return the rows in page-locked memory; a DataLoader calls this."""
        return Rows(self.buffer.pin_memory(), self.layout)


def _segments(cu_seqlens: torch.Tensor, seq_length: int) -> torch.Tensor:
    bounds = cu_seqlens.contiguous()
    places = torch.arange(seq_length, device=bounds.device, dtype=bounds.dtype)
    places = places.expand(*bounds.shape[:-1], -1).contiguous()
    return torch.searchsorted(bounds, places, right=True) - 1


def collate_rows(rows: Rows | Sequence[Rows]) -> Rows:
    """Make a batch, one contiguous tensor.

    Raises:
        ValueError: rows with different fields.

    Example:
        >>> batch = next(iter(DataLoader(rows, batch_size=4, collate_fn=collate_rows)))
        >>> batch["labels"].shape
        torch.Size([4, 2048])
    """
    if isinstance(rows, Rows):
        return rows
    layout = rows[0].layout
    for row in rows:
        if row.layout is not layout and row.layout != layout:
            raise ValueError(
                f"rows of two layouts in one batch, {layout} and {row.layout}: batch each dataset "
                "on its own, or read both with equal seq_length and teacher_seq_length and put "
                "what they hold into one dataset"
            )
    return Rows(torch.stack([row.buffer for row in rows]), rows[0].layout)
