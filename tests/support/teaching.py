"""Options of who teaches, and of what is read, given next to others."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, StreamConfig


def with_teaching(options: dict[str, Any]) -> dict[str, Any]:
    """Put those of `Teaching` into one."""
    own, others = _divide(options, Teaching)
    return others | {"teaching": Teaching(**own)}


def open_rows(path: Path | str, **options: Any) -> AlignedRows:
    """Open a dataset's rows by options of `Reading`, `Teaching` and `StreamConfig`."""
    reading, others = _divide(options, Reading)
    return AlignedRows(StreamConfig(Reading(str(path), **reading), **with_teaching(others)))


def _divide(options: dict[str, Any], kind: type[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {field.name for field in fields(kind)}
    own = {name: value for name, value in options.items() if name in names}
    return own, {name: value for name, value in options.items() if name not in names}
