"""Options of who teaches, given next to others."""

from dataclasses import fields
from typing import Any

from pipeline.scoring.teaching import Teaching

NAMES = {field.name for field in fields(Teaching)}


def with_teaching(options: dict[str, Any]) -> dict[str, Any]:
    """Put those of `Teaching` into one."""
    own = {name: value for name, value in options.items() if name in NAMES}
    return {name: value for name, value in options.items() if name not in NAMES} | {
        "teaching": Teaching(**own)
    }
