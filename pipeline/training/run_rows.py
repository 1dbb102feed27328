"""A run's rows."""

from pipeline.drawing.formatting import format_plural
from pipeline.streaming import AlignedRows
from pipeline.training.checkpoint import saved_stream
from pipeline.training.config import TrainConfig
from pipeline.training.ranks import Ranks


def open_rows(config: TrainConfig, ranks: Ranks) -> AlignedRows:
    """Open a run's rows at its checkpoint's position; ValueError if they are too few."""
    rows = AlignedRows(config.stream, saved_stream(config))
    _require_rows(config, rows)
    share = config.micro_batch_size * ranks.count
    if config.global_batch_size % share:
        raise ValueError(
            f"global_batch_size={config.global_batch_size} isn't a multiple of {share}, "
            f"micro_batch_size={config.micro_batch_size} by {ranks.count} processes: change one"
        )
    return rows


def _require_rows(config: TrainConfig, rows: AlignedRows) -> None:
    if rows.layout.sources and config.num_epochs != 1:
        raise ValueError(
            f"num_epochs={config.num_epochs}: a mixture's file says how often each dataset is "
            f"read; leave it out, and set max_epochs or repeat in {config.data.path}"
        )
    needed = config.num_steps * config.global_batch_size
    if len(rows) < needed:
        most = len(rows) // config.global_batch_size
        below = ", warmup_steps below that" if config.warmup_steps >= most else ""
        fewer = f"num_steps (to {most}{below}) or " if most else ""
        epochs = f"{format_plural(config.num_epochs, 'epoch')}: raise num_epochs"
        if rows.layout.sources:
            epochs = "all its epochs: raise max_epochs in its file"
        raise ValueError(
            f"{config.num_steps} steps need {needed} rows, {config.data.path} has {len(rows)} in "
            f"{epochs}, or lower {fewer}global_batch_size"
        )
