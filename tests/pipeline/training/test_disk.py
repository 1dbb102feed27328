"""Files and folders that are replaced whole."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from pipeline.training.disk import DiskFullError, replacing


def write_new(folder: Path) -> None:
    with replacing(folder, 1) as temporary:
        temporary.mkdir()
        for name in ("one", "two"):
            (temporary / name).write_text("new")


def test_a_kill_leaves_no_half_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that finds the folder takes it for whole, and doesn't export again."""
    folder = tmp_path / "model"
    write_new(folder)

    def die(path: Path) -> Any:
        os.remove(path / "one")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.disk.shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            write_new(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    write_new(folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "one", "two"]


def test_a_link_leads_to_another_disk(tmp_path: Path) -> None:
    """It ended in an error of rmtree, after the new folder was written."""
    (tmp_path / "large").mkdir()
    folder = tmp_path / "model"
    folder.symlink_to("large/model")
    for _ in range(2):
        write_new(folder)
    assert folder.is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *("large", "model", "model", "one", "two")
    ]


def test_a_kill_between_the_renames_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the next start has no room for another."""
    folder, rename = tmp_path / "model", os.replace
    write_new(folder)

    def die(source: Path, target: Path) -> None:
        if target == folder:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.disk.os.replace", die)
        with pytest.raises(KeyboardInterrupt):
            write_new(folder)
    assert not folder.exists()
    with pytest.raises(DiskFullError), replacing(folder, 1 << 80):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "one", "two"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EFBIG, os.strerror(errno.EFBIG)),
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
    ],
)
def test_other_failures_are_told_with_their_place(tmp_path: Path, error: Exception) -> None:
    folder = tmp_path / "model"

    def fail() -> None:
        with replacing(folder, 1) as temporary:
            temporary.mkdir()
            raise error

    with pytest.raises(OSError, match="File too large") as raised:
        fail()
    assert str(folder) in str(raised.value)
    assert not any(tmp_path.iterdir())
