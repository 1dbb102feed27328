"""Equal chunks of a row instead of alignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind

if TYPE_CHECKING:
    from pipeline.losses.loss_result import LossResult
    from pipeline.methods.micro_batch_loss import MicroBatchLoss


def _loss(given: MicroBatchLoss) -> LossResult:
    from pipeline.guidance.baselines import row_chunk_ids, select_chunks

    num_chunks, batch = given.method.num_chunks, given.batch
    # Place t predicts token t + 1, so it belongs to that token's chunk.
    of_labels = row_chunk_ids(batch.student_is_text, num_chunks).roll(-1, dims=1)
    selection = select_chunks(
        given.scores.losses.detach(),
        given.teacher_losses(),
        student_chunk_ids=of_labels.masked_fill(~given.loss_mask.bool(), -1),
        teacher_chunk_ids=row_chunk_ids(batch.teacher_is_text, num_chunks),
        num_chunks=num_chunks,
        loss_mask=given.loss_mask,
        rule=given.rule,
        group=given.group,
        step=given.step,
    )
    return given.selected_loss(selection)


KINDS = (
    MethodKind(
        "chunks",
        "equal chunks in place of alignment (Table 2), by the teacher",
        _loss,
        selector="teacher",
        needs="losses",
        unread=("unmapped", "aggregation"),
        options=("num_chunks",),
    ),
    MethodKind(
        "chunks_random",
        "equal chunks, by chance",
        _loss,
        selector="random",
        unread=("unmapped", "aggregation"),
        options=("num_chunks",),
    ),
)
