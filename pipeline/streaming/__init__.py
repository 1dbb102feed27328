"""An aligned dataset, or a mixture of them, as rows for training: arithmetic, no state."""

from pipeline.packing.rules import Convention
from pipeline.streaming.config import StreamConfig
from pipeline.streaming.loader import RowLoader, load_batches
from pipeline.streaming.rows import AlignedRows, Rows, collate_rows
from pipeline.streaming.state import StreamMismatchError, StreamState

__all__ = [
    "AlignedRows",
    "Convention",
    "RowLoader",
    "Rows",
    "StreamConfig",
    "StreamMismatchError",
    "StreamState",
    "collate_rows",
    "load_batches",
]
