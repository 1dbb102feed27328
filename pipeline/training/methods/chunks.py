"""Equal chunks in place of alignment, by the teacher or by chance (Table 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.guidance import LossResult, guided_loss
from pipeline.guidance.baselines.chunking import row_chunk_ids, select_chunks
from pipeline.training.methods.interface import MethodKind

if TYPE_CHECKING:
    from pipeline.training.student_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    num_chunks, batch, losses = given.method.num_chunks, given.batch, given.scores.losses
    # Place t predicts token t + 1, so it belongs to that token's chunk.
    of_labels = row_chunk_ids(batch.student_is_text, num_chunks).roll(-1, dims=1)
    selection = select_chunks(
        losses,
        given.teacher_losses(),
        student_chunk_ids=of_labels.masked_fill(~batch["loss_mask"].bool(), -1),
        teacher_chunk_ids=row_chunk_ids(batch.teacher_is_text, num_chunks),
        num_chunks=num_chunks,
        loss_mask=batch["loss_mask"],
        rule=given.rule,
        group=given.group,
        step=given.step,
    )
    return guided_loss(losses, selection, expectation=given.method.expectation)


CHUNKS = MethodKind("chunks", _loss, selector="teacher", needs="losses")
CHUNKS_RANDOM = MethodKind("chunks_random", _loss, selector="random")
