"""Where the command starts: among a user's own files of our packages' names, and without a home."""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

import pipeline
from pipeline import provide_kernel_cache
from pipeline.command_line.commands import COMMANDS, run_command

ROOT = Path(__file__).parents[2]
SUBCOMMANDS = (
    *("explore info", "explore preview", "explore plan", "figures vocabulary", "figures tokens"),
    *("figures alignment", "figures kept"),
)
LARGE = {
    *("apache_beam", "duckdb", "fsspec", "fastokens", "huggingface_hub", "lm_eval"),
    *("matplotlib", "megatron", "numba", "numpy", "pyarrow", "scipy", "sentencepiece", "sympy"),
    *("tokenizers", "torch", "tqdm", "transformers"),
}
"""Each takes a tenth of a second or more to import."""


def run(*command: str, folder: Path, path: str = str(ROOT)) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder, which `-m` puts first on the path."""
    given, environment = [sys.executable, *command], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(given, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline.py", "schemas/__init__.py"])
def test_a_users_own_file_that_hides_ours_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    package = name.split("/")[0].removesuffix(".py")
    hiding = tmp_path / name.split("/")[0]
    message = f'{hiding} hides vocag\'s own package "{package}":'
    safe = "start python with -P, so that it doesn't look there, or rename it"
    done = run("-m", "vocag", "validate", "data", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"vocag: error: {message} {safe}\n"
    done = run("-P", "-m", "vocag", "validate", "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    path = f"{tmp_path}:{ROOT}"
    done = run("-m", "vocag", "validate", "data", folder=ROOT.parent, path=path)
    assert done.stderr == f"vocag: error: {message} rename it, or take {tmp_path} off PYTHONPATH\n"
    for line in ("import beam_jobs", "import megatron_plugin", "from vocag import align_batch"):
        done = run("-c", line, folder=tmp_path)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"vocag.own_packages.HiddenPackageError: {message} {safe}"), last


@pytest.mark.slow
def test_another_distribution_that_overwrites_ours_is_named(tmp_path: Path) -> None:
    for name in ("vocag", "pipeline", "schemas"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pipeline" / "__init__.py").write_text("def run(): ...\n")
    record = tmp_path / "pipeline-2.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: pipeline\nVersion: 2.0\n")
    (record / "RECORD").write_text("pipeline/__init__.py,,\n")
    done = run("-m", "vocag", "validate", "data", folder=tmp_path, path=str(tmp_path))
    assert done.returncode == 2
    assert "pipeline has put its own __init__.py into" in done.stderr
    remedy = "pip uninstall pipeline && pip install --force-reinstall --no-deps vocag"
    assert done.stderr.endswith(f"use an environment for each, or {remedy}\n")


@pytest.mark.slow
def test_a_terminal_that_knows_ascii_only_shows_escapes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    line = "from pipeline.command_line.commands import main; import sys; main(sys.argv[1:])"
    own = "c.run_command = lambda a: print(a[0]) or 0"
    wrapped = f"import pipeline.command_line.commands as c; {own}; {line}"
    done = subprocess.run([sys.executable, "-c", wrapped, "·⏎"], env=environment, cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "\\xb7\\u23ce\n")


@pytest.mark.slow
def test_data_folders_of_our_packages_names_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "notes.txt").write_text("no package")
    done = run("-m", "vocag", "validate", "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run("-m", "vocag", "--version", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"vocag {version('vocag')}\n")


def test_the_console_script_starts_in_the_same_module() -> None:
    assert "\n    vocag = vocag.command:main\n" in (ROOT / "setup.cfg").read_text()


def test_kernels_have_a_place_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "noted, so that what is set below goes again")
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    provide_kernel_cache()
    assert "NUMBA_CACHE_DIR" not in os.environ  # the home, or the folder of the package, will do
    monkeypatch.setattr(pipeline, "PACKAGE", Path("/proc/self"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/nowhere")
    monkeypatch.delitem(sys.modules, "numba", raising=False)  # the one in use stays as it is
    provide_kernel_cache()
    ours = tmp_path / f"vocag-kernels-{os.getuid()}"
    assert os.environ["NUMBA_CACHE_DIR"] == str(ours)
    assert ours.stat().st_mode & 0o777 == 0o700
    ours.chmod(0o777)  # others may have put code there
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    provide_kernel_cache()
    assert os.environ["NUMBA_CACHE_DIR"] != str(ours)


@pytest.mark.parametrize("temporary", ["/proc/self/nowhere", None])
def test_without_any_writable_folder_each_process_compiles(
    temporary: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose disks can only be read; the import ended in a FileNotFoundError."""
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/proc/self/nowhere")
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setattr(pipeline, "PACKAGE", Path("/proc/self"))
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/self/nowhere"])
    provide_kernel_cache()
    assert "NUMBA_CACHE_DIR" not in os.environ


def test_a_user_without_a_home_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's with a number of its own; the import ended in a RuntimeError."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.setenv(name, "noted, so that it comes back")
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    provide_kernel_cache()
    pytest.importorskip("torch", reason="needs vocag[torch]")
    from pipeline.streaming import StreamConfig

    with pytest.raises(ValueError, match=r"has no home folder, .*: set HOME, or give"):
        StreamConfig("data")


def test_help_needs_no_large_library() -> None:
    script = (
        "import sys\nfrom pipeline.command_line.commands import run_command\n"
        f"for command in {[*COMMANDS, *SUBCOMMANDS]}:\n"
        "    try: run_command([*command.split(), '--help'])\n"
        "    except SystemExit as end: assert end.code == 0, command\n"
        f"    loaded = {LARGE} & sys.modules.keys()\n"
        "    assert not loaded, f'{command} loads {loaded}'"
    )
    done = run("-c", script, folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: vocag") == len([*COMMANDS, *SUBCOMMANDS])


@pytest.mark.parametrize("package", ["lm_eval", "math_verify"])
def test_a_package_that_only_the_work_needs_is_named(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`vocag evaluate --help` needs no extra, so that it is missed later."""
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name.startswith("pipeline.evaluation."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert run_command(["evaluate", "student", "--output", str(tmp_path)]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith("vocag evaluate: ")
    assert package in message
    assert hint == f"hint: pip install -e '{ROOT}[evaluate]'"


@pytest.mark.slow
def test_what_only_served_teachers_need_names_its_own_extra(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("openai", "handshake", "endpoints"):
        monkeypatch.delitem(sys.modules, f"pipeline.scoring.engines.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "tenacity", None)
    served = "--engine openai --endpoint http://localhost:9 --model m --dtype bfloat16"
    data = next(world.rglob("manifest.json")).parent
    words = ["score", str(data), *served.split(), "--quantization", "none", "--seq-length", "64"]
    assert run_command(words) == 2
    message, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "(tenacity)" in message
    assert hint == f"hint: pip install -e '{ROOT}[served]'"


def test_a_module_of_our_own_that_is_missing_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pipeline.evaluation.command", None)
    with pytest.raises(ModuleNotFoundError):
        run_command(["evaluate", "student"])
