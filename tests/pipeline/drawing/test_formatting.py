"""Numbers as people read them."""

import pytest

from pipeline.drawing.formatting import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (90000, "25 h 0 min"),
    ],
)
def test_a_duration_never_has_a_full_unit_of_the_next(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
