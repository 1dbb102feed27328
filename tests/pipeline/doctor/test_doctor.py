"""`vocag doctor`: its figures against other counts, and what it says where things are missing."""

import json
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from packaging.requirements import Requirement

from pipeline.command_line.commands import COMMANDS
from pipeline.command_line.installed import install
from pipeline.doctor import command, machine, requirements, torch_answers
from pipeline.doctor.command import describe, examine, main

ONE_KERNEL = "one kernel for all documents of packed rows"
DISTRIBUTIONS = {
    "vocag": (
        "1.0",
        [
            *("low>=1", "gone>=2", 'never>=1; python_version < "3"'),
            *('low>=3; extra == "a"', 'vocag[a]; extra == "b"', 'rich[far]>=1; extra == "b"'),
        ],
    ),
    "low": ("2.5", []),
    "rich": ("1.2", ['star>=5; extra == "far"', 'moon; extra == "near"']),
    "star": ("4.0", []),
}


@pytest.fixture
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four distributions are installed and no others."""

    def known(answer: Callable[[str], Any]) -> Callable[[str], Any]:
        def ask(name: str) -> Any:
            if name not in DISTRIBUTIONS:
                raise metadata.PackageNotFoundError(name)
            return answer(name)

        return ask

    monkeypatch.setattr(requirements, "version", known(lambda name: DISTRIBUTIONS[name][0]))
    monkeypatch.setattr(requirements, "requires", known(lambda name: DISTRIBUTIONS[name][1]))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("", ["gone>=2 (not installed)"]),
        ("a", ["low>=3 (2.5 is installed)"]),
        ("b", ["low>=3 (2.5 is installed)", "star>=5 (4.0 is installed)"]),
    ],
)
def test_what_an_extra_lacks(small_world: None, extra: str, expected: list[str]) -> None:
    assert requirements.missing(extra) == expected
    assert requirements.library_versions() == {
        **{"gone": None, "low": "2.5", "never": None, "rich": "1.2"}
    }


def test_the_machines_figures_are_psutils() -> None:
    found = machine.describe_machine()
    assert found["cores"] == len(psutil.Process().cpu_affinity())
    assert 0 < found["memory_bytes"] <= psutil.virtual_memory().total
    assert found["disk_free_bytes"] == pytest.approx(psutil.disk_usage(".").free, rel=0.02)


def test_caches_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "vocag" / "shards" / "deep"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"x" * 1000)
    (folder / "link").symlink_to(folder / "a")
    (tmp_path / "vocag" / "file").write_bytes(b"no folder")
    found = machine.describe_caches()
    [size] = subprocess.check_output(["wc", "-c", folder / "a"], text=True).split()[:1]
    assert found[str(tmp_path / "vocag" / "shards")] == int(size) == 1000


def test_a_user_without_a_home_has_no_caches_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user has a number alone; it was a RuntimeError."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    (tmp_path / "vocag" / "shards").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", "noted, so that it comes back")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert str(tmp_path / "vocag" / "shards") in machine.describe_caches()


def test_commands_lack_what_their_extras_lack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the JSON of a bug report says what the lines do."""
    gpus = [
        {
            "name": "H200",
            "memory_bytes": 150_000_000_000,
            "packed_kernel": True,
            "bfloat16": True,
            "fused_optimizer": False,
        }
    ]
    monkeypatch.setattr(machine, "describe_gpu", lambda: {"devices": gpus})
    monkeypatch.setattr(requirements, "missing", lambda extra="": [f"x-{extra}"] * (extra == "hf"))
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    needing = [name for name, (_, extra, _) in COMMANDS.items() if "hf" in extra.split(",")]
    assert found["commands"] == {name: ["x-hf"] * (name in needing) for name in COMMANDS}
    assert found["fast_path"] == {"works": True}
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    for name, version in found["libraries"].items():
        assert version is None or version == metadata.version(name)
    assert found["libraries"]["numpy"] == installed["numpy"]
    named = {Requirement(line).name for line in metadata.requires("vocag") or ()}
    assert set(found["libraries"]) == named - {"vocag"}
    lines = list(describe(found))
    assert "GPU         H200 150 GB" in lines
    assert f"training    H200 has {ONE_KERNEL}, bfloat16" in lines
    assert "            lacks fused AdamW" in lines
    assert "incomplete  hf" in lines
    assert "train       lacks x-hf" in lines
    assert f"            hint: {install('hf')}" in lines


def test_a_gpu_without_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a V100 under a newer torch, of which "torch can't be imported" was told."""

    def fails(*_: int, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nFor debugging, pass")

    found = SimpleNamespace(name="V100", total_memory=150_000_000_000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch, "zeros", fails)
    torch_answers.print_answers()
    gpu = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(machine, "describe_gpu", lambda: gpu)
    lines = list(describe(examine()))
    assert "GPU         V100 150 GB" in lines
    why = "CUDA error: no kernel image is available"
    assert f"training    V100 computes nothing here: {why}" in lines


def test_a_checkout_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "metadata", unknown)
    assert "not installed" in command._installed()["problem"]


@pytest.mark.slow
def test_torch_is_asked_with_a_limit() -> None:
    assert "did not answer in 0.01 s" in machine.describe_gpu(0.01)["problem"]
    found = examine()["gpu"]
    assert found["torch"] == torch.__version__
    assert len(found["devices"]) == torch.cuda.device_count()
