"""A run that fails because a disk is full says so, and names the folder."""

import resource
from argparse import Namespace
from traceback import extract_tb

import pytest

pytest.importorskip("megatron.core")

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_plugin import export_hf
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


def test_an_export_that_was_cut_can_be_repeated(tmp_path, monkeypatch):
    config = {"vocab_size": 4, "architecture": "x" * 9000}
    student = Namespace(family="llama", config=config), {"weight": torch.zeros(2)}
    monkeypatch.setattr(export_hf, "read_student", lambda _: student)

    def export():
        return export_hf.export_student(tmp_path, tmp_path / "out", with_tokenizer=False)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as cut:
            export()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert cut.value.filename == str(tmp_path / "out/config.json")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    export()
    assert (tmp_path / "out/config.json").stat().st_size > 9000
