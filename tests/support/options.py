"""Commands that end as soon as they have read their options."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.command_line import option_parsing


class Accepted(BaseException):  # no command may catch it
    """A command has read its options."""


def stop_after_options(
    patch: pytest.MonkeyPatch, check: Callable[[Any], object] = lambda _: None
) -> None:
    """Let commands raise `Accepted` once their options are read and checked."""
    read = option_parsing.read_options

    def stop(kind: type, values: Any, **more: Any) -> None:
        check(read(kind, values, **more))
        raise Accepted

    patch.setattr(option_parsing, "read_options", stop)
