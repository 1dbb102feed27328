"""Disks that are too small are found out before they are full."""

from pathlib import Path

import pytest

from beam_jobs import shortages
from beam_jobs.errors import OptionsError
from beam_jobs.shortages import require_disk


def test_room_is_compared_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shortages, "free_bytes", lambda folder: 1000)
    require_disk(str(tmp_path), 1000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "bucket.tar").write_bytes(bytes(500))
    require_disk(str(tmp_path), 1500, earlier=str(tmp_path / "run"))
    require_disk("gs://bucket/data", 10**15)
    assert caplog.text == ""
    for need, least, ample in ((2000, 0.5, 1.0), (1000, 1.0, 1.05)):
        caplog.clear()
        require_disk(str(tmp_path / "not" / "there"), need, least=least, ample=ample)
        assert "it may run out of space" in caplog.text
        assert "has 1.00 kB of free disk" in caplog.text
    for need, least in ((1001, 1.0), (2001, 0.5)):
        with pytest.raises(OptionsError, match=r"has 1.00 kB of free disk.*; free some"):
            require_disk(str(tmp_path), need, least=least)
