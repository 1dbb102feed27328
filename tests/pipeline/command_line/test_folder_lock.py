"""A folder's lock, whose last holder removes it at any moment."""

import os
from pathlib import Path

import pytest

from pipeline.command_line import folder_lock
from pipeline.command_line.folder_lock import hold_folder


@pytest.mark.parametrize("call", ["fcntl.flock", "os.fstat"])
def test_one_that_is_removed_while_it_is_taken_is_made_again(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / ".lock"
    module, name = call.split(".")
    original = getattr(getattr(folder_lock, module), name)

    def remove_first(*arguments: object) -> object:
        monkeypatch.undo()
        path.unlink()
        path.parent.rmdir()
        return original(*arguments)

    monkeypatch.setattr(getattr(folder_lock, module), name, remove_first)
    with hold_folder(str(path), "out"):
        assert path.exists()
    assert not os.listdir(tmp_path)


def test_one_that_somebody_removed_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with hold_folder(str(path), "out"):
        path.unlink()
    assert not os.listdir(tmp_path)
