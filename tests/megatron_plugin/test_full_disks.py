"""A run that fails because a disk is full says so, and names the folder."""

from traceback import extract_tb

import pytest

pytest.importorskip("megatron.core")

from torch.distributed.checkpoint.api import CheckpointException

from megatron_plugin.student.student_run import StudentRun, explain_full_disks


def notes(error):
    return getattr(error, "__notes__", [])


def failed_write():
    """A write to a full device, reported as a library would."""
    try:
        with open("/dev/full", "wb") as file:
            file.write(b"weights")
    except OSError as error:
        wrapped = RuntimeError("a tensor was not written")
        wrapped.__cause__ = error
        return wrapped
    raise AssertionError("/dev/full took a write")


def test_a_write_that_failed_names_the_folders(tmp_path):
    error = failed_write()
    explain_full_disks(error, [tmp_path / "not" / "yet", None])
    (note,) = notes(error)
    assert note.startswith(f"no space is left on the disk of {tmp_path / 'not' / 'yet'} (")
    assert note.endswith("MiB free): make room or name another folder")


@pytest.mark.parametrize(("nearly_full_bytes", "is_full"), [(1 << 62, True), (0, False)])
def test_a_full_disk_is_found_whatever_the_error_says(tmp_path, nearly_full_bytes, is_full):
    error = RuntimeError("unexpected pos 64 vs 0")
    explain_full_disks(error, [tmp_path], nearly_full_bytes=nearly_full_bytes)
    assert any(str(tmp_path) in note for note in notes(error)) == is_full


def test_a_failed_checkpoint_is_explained(tmp_path):
    failure = failed_write().__cause__
    error = CheckpointException("write", {0: (failure, extract_tb(failure.__traceback__))})
    run = StudentRun.__new__(StudentRun)
    run._written = [str(tmp_path)]
    run.__exit__(type(error), error, None)
    assert any(str(tmp_path) in note for note in notes(error))
