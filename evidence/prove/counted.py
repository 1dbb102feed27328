"""`vocag train` whose loss counts some documents' tokens alone; it reads the others all the same.

    python evidence/prove/counted.py "kind = 'clean'" --data aligned --student model --method full …

`vocag train --where` leaves documents out of the rows. Here rows, their order and the number of
steps stay, and labels of other documents are masked, so that this is a perfect choice of tokens.
"""

import sys
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.chosen_documents import select_documents
from pipeline.streaming.dataset_rows import DatasetRows
from pipeline.streaming.layout import RowLayout
from pipeline.training.command import main


def count_only(condition: str) -> None:
    """Mask the labels of documents that a condition is not true of, wherever rows are read."""

    @cache
    def counted(rows: DatasetRows) -> NDArray[np.bool_]:
        """Return which documents count, through all shards."""
        shards = select_documents(rows.opened.dataset, condition).each(lambda *read: read)
        return np.concatenate(
            [np.ones(len(index), np.bool_) if kept is None else kept for index, kept in shards]
        )

    write_row = DatasetRows.write_row

    def write(
        self: DatasetRows, row: NDArray[np.int32], layout: RowLayout, epoch: int, position: int
    ) -> None:
        write_row(self, row, layout, epoch, position)
        start, stop = self.plan.row_starts[self.order.row_index(epoch, position) :][:2]
        bounds, mask = layout.field(row, "cu_seqlens"), layout.field(row, "loss_mask")
        counts = counted(self)[self.plan.segments["document"][start:stop]]
        for segment in np.flatnonzero(~counts):
            mask[bounds[segment] : bounds[segment + 1]] = 0

    rows: Any = DatasetRows  # a method is replaced, which types don't allow
    rows.write_row = write


if __name__ == "__main__":
    count_only(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
