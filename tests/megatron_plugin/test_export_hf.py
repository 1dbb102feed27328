"""An export leaves a whole model or none, and one process writes it."""

import resource
from argparse import Namespace

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_plugin import export_hf
from megatron_plugin.export_command import main
from pipeline.command_line.folder_lock import hold_folder


@pytest.fixture(autouse=True)
def _student(monkeypatch):
    config = {"vocab_size": 4, "architecture": "x" * 9000}
    student = Namespace(family="llama", config=config), {"weight": torch.zeros(2)}
    monkeypatch.setattr(export_hf, "read_student", lambda _: student)


def test_an_export_that_was_cut_can_be_repeated(tmp_path, capsys):
    output = tmp_path / "out"
    command = [str(tmp_path), str(output), "--no-tokenizer"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert main(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{output}/config.json would be larger than ulimit -f" in capsys.readouterr().err
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]
    assert main(command) == 0
    assert (output / "config.json").stat().st_size > 9000


def test_a_second_export_to_one_folder_is_refused(tmp_path, capsys):
    output = tmp_path / "out"
    command = [str(tmp_path), str(output), "--no-tokenizer"]
    with hold_folder(str(tmp_path / ".out.lock"), str(output)):
        assert main(command) == 2
    assert f"writes to {output}; wait until it has ended" in capsys.readouterr().err
    assert main(command) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
