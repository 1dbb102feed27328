"""Equal chunks in place of alignment, by the teacher or by chance (Table 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.guidance import LossResult, guided_loss
from pipeline.guidance.baselines.chunking import row_chunk_ids, select_chunks
from pipeline.training.methods.interface import MethodKind

if TYPE_CHECKING:
    from pipeline.training.student_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    method, batch, losses = given.method, given.batch, given.scores.losses

    def ids(bounds: str, is_text: Tensor) -> Tensor:
        return row_chunk_ids(batch[bounds], is_text, method.num_chunks, chunk_of=method.chunk_of)

    # Place t predicts token t + 1, so it belongs to that token's chunk.
    of_labels = ids("cu_seqlens", batch.student_is_text).roll(-1, dims=1)
    num_parts = 1 if method.chunk_of == "row" else batch["cu_seqlens"].shape[1] - 1
    selection = select_chunks(
        losses,
        given.teacher_losses(),
        student_chunk_ids=of_labels.masked_fill(~batch["loss_mask"].bool(), -1),
        teacher_chunk_ids=ids("teacher_cu_seqlens", batch.teacher_is_text),
        num_chunks=method.num_chunks * num_parts,
        loss_mask=batch["loss_mask"],
        rule=given.rule,
        group=given.group,
        step=given.step,
    )
    return guided_loss(losses, selection, expectation=method.expectation)


CHUNKS = MethodKind("chunks", _loss, selector="teacher", needs="losses")
CHUNKS_RANDOM = MethodKind("chunks_random", _loss, selector="random")
