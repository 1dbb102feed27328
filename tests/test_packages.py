"""What is built of this repository: a wheel and a source distribution, tried in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

PARTS = ("schemas", "vocag", "pipeline", "beam_jobs", "megatron_plugin")
DATA = (
    *("schemas/manifest.schema.json", "pipeline/tokenization/known_splits.json"),
    *("pipeline/evaluation/math500.txt", "vocag/py.typed"),
)
_BUILD = "from setuptools import build_meta as b; print(b.build_{}({!r}))"
_TRY = """
import sys, vocag
from importlib.resources import files
from pathlib import Path
print(Path(vocag.__file__).parent, vocag.__version__)
print(*vocag.align_batch.__code__.co_filename.split("site-packages")[:1])
for name in sys.argv[1:]:
    folder, _, file = name.rpartition("/")
    assert files(folder.replace("/", ".")).joinpath(file).is_file(), name
"""


def run(*command: str | Path, folder: Path, python: Path = Path(sys.executable)) -> str:
    """Run Python in a folder and return its output; the checkout is on no path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [python, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, output: Path) -> Path:
    """Build by the back end that pyproject.toml names, without a network."""
    return output / run("-c", _BUILD.format(kind, str(output)), folder=source).splitlines()[-1]


def tracked(repository: Path, *folders: str) -> list[str]:
    command = ["git", "ls-files", *folders]
    return subprocess.check_output(command, cwd=repository, text=True).splitlines()


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built of it alone."""
    root = tmp_path_factory.mktemp("built")
    for name in tracked(repository):
        (root / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, root / "checkout" / name)
    sdist = build("sdist", root / "checkout", root)
    with tarfile.open(sdist) as archive:
        archive.extractall(root, filter="data")
    return sdist, build("wheel", root / sdist.name.removesuffix(".tar.gz"), root)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(
    repository: Path, built: tuple[Path, Path]
) -> None:
    """No module and no data file is forgotten, and nothing else is there."""
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = f"vocag-{version('vocag')}.dist-info"
        metadata = archive.read(f"{about}/METADATA").decode()
        scripts = archive.read(f"{about}/entry_points.txt").decode()
    assert names == set(tracked(repository, *PARTS))
    assert names >= set(DATA)
    assert wheel.name == f"vocag-{version('vocag')}-py3-none-any.whl"
    assert "License-File: LICENSE" in metadata
    assert "vocag = vocag.command:main" in scripts
    assert sdist.name == f"vocag-{version('vocag')}.tar.gz"
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed >= {*tracked(repository, "docs", "examples"), "Makefile", "constraints.txt"}
    assert not [name for name in packed if name.startswith("tests")]


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment of its own, which sees the libraries of this one but not the checkout."""
    run("-m", "venv", "--without-pip", "env", folder=tmp_path)
    python, empty = tmp_path / "env/bin/python", tmp_path / "empty"
    empty.mkdir()
    ask = "import site; print(site.getsitepackages()[0])"
    site = Path(run("-c", ask, folder=empty, python=python).strip())
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(site)
    libraries = {str(Path(path)) for path in sys.path if path.endswith("site-packages")}
    (site / "libraries.pth").write_text("\n".join(sorted(libraries)) + "\n")
    told = run("-c", _TRY, *DATA, folder=empty, python=python).splitlines()
    assert told[0] == f"{site / 'vocag'} {version('vocag')}"
    assert told[1] == str(site.parent) + "/"
    assert run("-m", "vocag", "--version", folder=empty, python=python).split() == [
        *("vocag", version("vocag"))
    ]
    assert run("-m", "vocag", "--help", folder=empty, python=python).startswith("usage: vocag")
    assert "--json" in run("-m", "vocag", "doctor", "--help", folder=empty, python=python)
    assert list(empty.iterdir()) == []


_COMPILERS = re.compile(
    r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|ld|as|cmake|ninja|rustc|cargo)(-\d+)?"
)


@pytest.mark.long
@pytest.mark.slow
def test_make_demo_needs_no_compiler_and_no_cache(repository: Path, tmp_path: Path) -> None:
    """From nothing, as in python:3.12-slim with make: the packages come from the network."""
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    for name in tracked(repository):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, checkout / name)
    programs.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in os.listdir(folder):
            if not _COMPILERS.fullmatch(program) and not (programs / program).is_symlink():
                (programs / program).symlink_to(f"{folder}/{program}")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XDG_"))}
    environment |= {"PATH": str(programs), "HOME": str(tmp_path), "PIP_NO_CACHE_DIR": "1"}
    assert shutil.which("make", path=str(programs))
    assert not shutil.which("cc", path=str(programs))
    python = Path(sys.executable).resolve()
    for _ in range(2):  # the second time nothing is left to do but the demo
        done = subprocess.run(
            ["make", "demo", f"PYTHON={python}"],
            cwd=checkout, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "clean: demo/aligned keeps every rule" in done.stdout
    assert "pip install" not in done.stdout
