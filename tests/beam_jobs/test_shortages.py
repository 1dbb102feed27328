"""Disks that are too small are found out before they are full."""

from pathlib import Path
from typing import Any

import pytest

from beam_jobs import shortages
from beam_jobs.errors import OptionsError
from beam_jobs.shortages import require_room


def test_room_is_compared_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shortages, "free_bytes", lambda folder: 1000)
    told: Any = {"message": "{room} is free", "remedy": "free some"}
    require_room(str(tmp_path), 1000, **told)
    require_room(str(tmp_path), 1500, **told, there=500)
    require_room("gs://bucket/data", 10**15, **told)
    assert caplog.text == ""
    for need, shares in ((2000, {"least": 0.5}), (1000, {"ample": 1.05})):
        caplog.clear()
        require_room(str(tmp_path / "not" / "there"), need, **told, **shares)
        assert "1.00 kB is free; it may run out of space" in caplog.text
    for need, least in ((1001, 1.0), (2001, 0.5)):
        with pytest.raises(OptionsError, match=r"^1.00 kB is free; free some$"):
            require_room(str(tmp_path), need, **told, least=least)
