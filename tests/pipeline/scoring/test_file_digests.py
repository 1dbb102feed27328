"""A digest is remembered for as long as a file stays as it is, and no longer."""

import json
import os
from hashlib import sha256
from pathlib import Path

import pytest

from pipeline.models import file_digests
from pipeline.models.file_digests import digest_of_files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where digests are kept; every file counts as written long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "_TICK_NS", -(1 << 62))
    return tmp_path / "cache" / "vocag" / "file-digests"


def digest_in_new_process(*files: Path) -> str:
    """Return the digest as a process gives it that has read nothing yet."""
    file_digests._digest_of_state.cache_clear()
    return digest_of_files(files)


def slow_digest(*files: Path) -> str:
    return sha256(
        json.dumps([[f.name, sha256(f.read_bytes()).hexdigest()] for f in files]).encode()
    ).hexdigest()


def test_digests_are_of_names_and_contents_in_order(tmp_path: Path, cache: Path) -> None:
    files = [tmp_path / name for name in ("b", "a", "c")]
    for file in files:
        file.write_bytes(os.urandom(300_000))
    assert digest_in_new_process(*files) == slow_digest(*files)
    assert len(list(cache.iterdir())) == 3
    assert digest_in_new_process(*reversed(files)) == slow_digest(*reversed(files))


def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    digest_in_new_process(file)
    (kept,) = cache.iterdir()
    kept.write_text("0" * 64)  # what it says is believed
    content = json.dumps([["weights", "0" * 64]]).encode()
    assert digest_in_new_process(file) == sha256(content).hexdigest()


def test_any_change_is_seen(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    before, status = digest_in_new_process(file), file.stat()
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same size and time
    other.rename(file)
    assert digest_in_new_process(file) == slow_digest(file) != before
    link = tmp_path / "link" / "weights"  # as the hub's client makes them
    link.parent.mkdir()
    link.symlink_to(file)
    assert digest_in_new_process(link) == slow_digest(file)
    assert len(list(cache.iterdir())) == 2


def test_what_was_just_written_is_read_but_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "_TICK_NS", 1 << 62)
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert digest_in_new_process(file) == slow_digest(file)
    assert not cache.exists()


def test_a_cache_that_is_damaged_or_can_not_be_written_is_done_without(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    digest_in_new_process(file)
    (kept,) = cache.iterdir()
    for damage in (b"", b"0" * 63, b"\xff\xfe"):
        kept.write_bytes(damage)
        assert digest_in_new_process(file) == slow_digest(file)
    (tmp_path / "file").write_text("no folder")
    for home in (tmp_path / "file", Path("/proc/self/nowhere")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        assert digest_in_new_process(file) == slow_digest(file)
