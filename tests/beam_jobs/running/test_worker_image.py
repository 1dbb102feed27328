"""What the Dockerfile builds from, checked without a container engine."""

import configparser
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.corpus import STUDENT, TEACHER, json_line, make_text

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_the_image_has_the_launchers_python_and_beam() -> None:
    base = re.search(r"^FROM apache/beam_python([\d.]+)_sdk:([\d.]+)$", DOCKERFILE, re.MULTILINE)
    assert base
    assert base[1] == (ROOT / ".python-version").read_text().strip()
    assert base[2] == version("apache-beam")


def test_the_extras_of_the_image_exist() -> None:
    extras = set(SETUP["options.extras_require"])
    assert set(re.findall(r"EXTRA=(\w+)", DOCKERFILE)) == {"gcp", "aws"} <= extras


def test_the_build_context_holds_what_the_image_needs() -> None:
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert [name for name in kept if not (ROOT / name).exists()] == []
    packages = SETUP["options.packages.find"]["include"].replace("*", "").split()
    named = re.findall(r"(?:/tmp/vocag/)(\S+\.py)", DOCKERFILE)
    assert set(packages) | set(named) <= set(kept)


def test_the_training_image_has_what_it_names() -> None:
    text = (ROOT / "docker/training.Dockerfile").read_text()
    python = (ROOT / ".python-version").read_text().strip()
    assert re.findall(r"^FROM (\S+)$", text, re.MULTILINE) == [f"python:{python}-slim"]
    [extras] = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    assert set(extras.split(",")) <= set(SETUP["options.extras_require"])
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(re.findall(r"/tmp/vocag/(\S+)", text)) == {"constraints.txt"} <= set(kept)


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_of_the_image_compiles_nothing(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    environment = {**os.environ, **image_environment(), "NUMBA_CACHE_DIR": str(kernels)}
    script = ROOT / "docker/compile_kernels.py"
    subprocess.run([sys.executable, script], env=environment, check=True, capture_output=True)
    compiled = sorted(kernels.rglob("*.nbc"))
    assert compiled
    texts = [make_text(number) for number in range(20)]
    lines = [json_line(f"doc-{place}", text) for place, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    job = [
        sys.executable, "-m", "beam_jobs.align", f"--input={tmp_path}/in.jsonl",
        f"--output={tmp_path}/out", f"--student={STUDENT}", f"--teacher={TEACHER}",
    ]  # fmt: skip
    traced = {**environment, "NUMBA_DEBUG_CACHE": "1"}
    result = subprocess.run(job, env=traced, check=True, capture_output=True, text=True)
    assert "data loaded" in result.stdout
    assert "data saved" not in result.stdout
    assert sorted(kernels.rglob("*.nbc")) == compiled


def image_environment() -> dict[str, str]:
    return dict(re.findall(r'(NUMBA_CPU_\w+)="?(\w*)"?', DOCKERFILE))
