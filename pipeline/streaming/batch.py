"""A row or a batch of rows as named tensors over one buffer, which processes pass as one tensor."""

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
            segment's last token: none predicts across documents.
        teacher_spans: int32 [B, seq_length, 2], of the label: the half-open range of the row's
            teacher tokens that cover it; (0, 0) if it is an end token, padding, or covered by none.
        teacher_input_ids, teacher_position_ids: int32 [B, teacher_seq_length]. A token at position
            0 has no context and no loss.
        cu_seqlens, teacher_cu_seqlens: int32 [B, max_segments + 2], bounds of segments, of which
            the padding is the last; filled up with the row's length.
        num_quarantined_tokens: int32 [B], student tokens masked because their sample is damaged.
        teacher_losses: float32 [B, teacher_seq_length], nats, NaN if there is none; only where
            rows are read with `Teaching.stored_losses`.
        next_token_ids: int32 [B, seq_length, K], the student's tokens that the teacher expects in
            place of each label, -1 for none, which the first one is if a label has no distribution;
            only where rows are read with `StreamConfig.with_distributions`. Of the K columns,
            `layout.entries`, the exact ones come first, of each teacher by falling mass, and drawn
            ones last, of which several may be the same.
        next_token_probs: float32 [B, seq_length, K], their mass; what is left of 1 is other
            tokens'.
        own_token_ids: int32 [B, seq_length], the student's token that what is left of the text's
            own teacher token stands for, -1 for none: its mass is of the label if both are in one
            cell (`vocabulary_map(rows).cells`). With `next_token_ids`.
        source: int32 [B], place in `layout.sources` of the row's dataset; only in a mixture.
    """

    def __init__(self, buffer: torch.Tensor, layout: RowLayout, host: "Rows | None" = None) -> None:
        """View `buffer`, int32 [..., layout.num_words]; `host` are the rows it is a copy of."""
        self.buffer = buffer
        self.layout = layout
        self._host = host

    @property
    def host(self) -> "Rows | None":
        """The same rows in host memory, readable without waiting for a device. None if unknown."""
        return self if self.buffer.device.type == "cpu" else self._host

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a field, a view."""
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
        """Iterate over the fields' names."""
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        """Return the number of fields."""
        return len(self.layout.shapes)

    @property
    def student_is_text(self) -> torch.Tensor:
        """Places of segments that the student learns from, bool [B, seq_length].

        Excludes padding and damaged samples, whose positions count like any segment's.
        """
        return self._is_text("cu_seqlens", self.layout.seq_length)

    @property
    def teacher_is_text(self) -> torch.Tensor:
        """Places of the same segments' teacher tokens, bool [B, teacher_seq_length]."""
        return self._is_text("teacher_cu_seqlens", self.layout.teacher_seq_length)

    @property
    def teacher_has_loss(self) -> torch.Tensor:
        """Which teacher tokens have a loss, bool [B, teacher_seq_length].

        Those with a context, or a stored loss, in a segment that the student learns from. Of chats
        only those mapped to a learned label: other text of templates isn't taught.
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
        """Return the rows on a device, moved as one tensor, with the host's rows."""
        return Rows(self.buffer.to(device, non_blocking=non_blocking), self.layout, self.host)

    def pin_memory(self) -> "Rows":
        """Return the rows in page-locked memory; a DataLoader calls this."""
        return Rows(self.buffer.pin_memory(), self.layout)


def _segments(cu_seqlens: torch.Tensor, seq_length: int) -> torch.Tensor:
    """Return the number of each place's segment, int64 [..., seq_length]."""
    bounds = cu_seqlens.contiguous()
    places = torch.arange(seq_length, device=bounds.device, dtype=bounds.dtype)
    places = places.expand(*bounds.shape[:-1], -1).contiguous()
    return torch.searchsorted(bounds, places, right=True) - 1


def collate_rows(rows: Rows | Sequence[Rows]) -> Rows:
    """Return a batch as one contiguous tensor.

    Raises:
        ValueError: rows whose fields have different shapes.

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
