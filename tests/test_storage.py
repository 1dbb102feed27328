import os
from pathlib import Path

import pytest

from beam_jobs.storage import open_shard_to_write

PARTS = [b"small", b"x" * (3 << 20), b"", b"end"]


def refuse(*_: int) -> None:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("advice", ["taken", "refused", "unknown"])
def test_a_shard_holds_what_was_written_whatever_becomes_of_the_advice(
    advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if advice == "refused":
        monkeypatch.setattr(os, "posix_fadvise", refuse)
    elif advice == "unknown":  # macOS
        monkeypatch.delattr(os, "posix_fadvise")
    path = tmp_path / "a.tar"
    with open_shard_to_write(str(path)) as file:
        for part in PARTS:
            file.write(part)
    assert path.read_bytes() == b"".join(PARTS)
