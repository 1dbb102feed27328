"""A teacher's NaN or infinite loss is named, or its document left out, masked and counted."""

import re

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_plugin.models.places import WHOLE_ROWS
from megatron_plugin.student.guide import Guide
from megatron_plugin.student.micro_batch import micro_batch
from pipeline.guidance import aggregate_teacher_losses
from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from tests.support.datasets import build_dataset
from tests.support.streaming_data import read_quarantine

POSITIONS = (4, 5)


def open_batch(folder, on_damage):
    """Return rows, a micro-batch of two of them, and what guides it."""
    build_dataset(folder / "data")
    config = StreamConfig(
        Reading(str(folder / "data")),
        seq_length=512,
        global_batch_size=2,
        on_damage=on_damage,
        cache_folder=folder / "cache",
        num_epochs=10,
    )
    rows = AlignedRows(config)
    read, device = rows.__getitems__(POSITIONS), torch.device("cpu")

    def leave_out(batch, row, segment, what):
        rows.leave_out(batch.run_positions[row], segment, what)

    batch = micro_batch(read, 2, POSITIONS, device=device, share=WHOLE_ROWS)
    return rows, batch, Guide(leave_out)


def losses_with(batch, value):
    """Return losses of 1 nat each, but for one of the second segment of row 1."""
    start, stop = batch.rows["teacher_cu_seqlens"][1, 1:3].tolist()
    assert stop - start > 3
    losses = torch.where(batch.rows["teacher_position_ids"] > 0, 1.0, torch.nan)
    losses[1, start + 2] = value
    return losses


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_document_shard_and_step_are_named(value, tmp_path):
    rows, batch, guide = open_batch(tmp_path, "raise")
    own = rows.datasets[0]
    row = own.order.row_index(*divmod(POSITIONS[1], rows.samples_per_epoch))
    document = int(own.plan.segments["document"][own.plan.row_starts[row] + 1])
    where = rows.datasets[0]._reader.describe(document, ValueError())
    told = f'document "{where.document_id}", sample {where.key} in {where.shard}, step 3 on '
    with pytest.raises(NonFiniteLossError, match=re.escape(told)):
        guide.by_teacher([batch], losses_with(batch, value), waited_seconds=0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_quarantined_document_is_masked_and_counted(value, tmp_path):
    rows, batch, guide = open_batch(tmp_path, "quarantine")
    whole, guided = (
        guide.by_teacher([batch], losses_with(batch, each), waited_seconds=0.0)[0]
        for each in (1.0, value)
    )
    start, stop = batch.rows["cu_seqlens"][1, 1:3].tolist()
    expected = whole.loss_mask.clone()
    expected[1, start:stop] = 0
    assert torch.equal(guided.loss_mask, expected)
    masked = int(whole.loss_mask[1, start:stop].sum())
    assert masked > 3
    assert guided.num_quarantined.tolist() == [0, masked]
    assert batch.num_quarantined.tolist() == [0, 0], "a batch is never changed"
    # Everything else is as it was.
    kept = expected.bool()
    before, after = (
        aggregate_teacher_losses(each.taught.losses, each.moved["teacher_spans"])
        for each in (whole, guided)
    )
    assert torch.equal(after[kept].nan_to_num(-1), before[kept].nan_to_num(-1))
    assert "NaN or infinite" in read_quarantine(rows.datasets[0].damage.file)[0].reason
