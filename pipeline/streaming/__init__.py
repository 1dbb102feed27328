"""Training rows of an aligned dataset, or a mixture: arithmetic, no state."""

from pipeline.packing.reading import Reading
from pipeline.packing.state import StreamMismatchError, StreamState
from pipeline.streaming.batch import Rows, collate_rows
from pipeline.streaming.loader import load_batches
from pipeline.streaming.rows import AlignedRows
from pipeline.streaming.stream_config import StreamConfig

__all__ = [
    "AlignedRows",
    "Reading",
    "Rows",
    "StreamConfig",
    "StreamMismatchError",
    "StreamState",
    "collate_rows",
    "load_batches",
]
