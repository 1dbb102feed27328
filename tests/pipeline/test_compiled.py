"""Compiled functions outlive damage to the machine code that numba keeps."""

import errno
import signal
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import config
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.errors import NumbaError

SOURCE = """
from pipeline.compiled import compiled

@compiled
def double(number):
    return 2 * number
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a module with one compiled function, whose code is kept next to it."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(config, "CACHE_DIR", "")
    path = tmp_path / "doubling.py"
    path.write_text(SOURCE)
    return path


def load(path: Path) -> Any:
    """Return the module as a new process would have it."""
    spec = spec_from_file_location("doubling", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_double(path: Path) -> Any:
    return load(path).double


def num_hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def test_code_is_kept(path: Path) -> None:
    assert load_double(path)(2) == 4
    again = load_double(path)
    assert again(3) == 6
    assert num_hits(again) == 1


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [b"", b"\x80\x04\x95", b"nonsense"])
def test_damaged_files_are_made_anew(path: Path, suffix: str, damage: bytes) -> None:
    assert load_double(path)(2) == 4
    (kept,) = path.parent.glob(f"**/*.{suffix}")
    kept.write_bytes(damage)
    double = load_double(path)
    assert double(3) == 6
    assert num_hits(double) == 0
    again = load_double(path)
    assert again(4) == 8
    assert num_hits(again) == 1


def test_a_full_disk_ends_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", fail)
    assert load_double(path)(2) == 4
    assert not list(path.parent.glob("**/*.nbi"))


def test_no_folder_to_write_to_ends_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(*_: object) -> None:
        raise RuntimeError("cannot cache function 'double': no locator available")

    monkeypatch.setattr(FunctionCache, "__init__", find_none)
    assert load_double(path)(2) == 4


@pytest.fixture
def heard() -> Iterator[None]:
    """Hear Ctrl-C, which shells let commands behind an & ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_inside_the_compiler_is_not_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = load_double(path)
    engine, calls = double.targetctx.codegen()._engine._ee, []
    own = engine._object_cache_notify

    def interrupt(*arguments: object) -> None:
        calls.append(arguments)
        signal.raise_signal(signal.SIGINT)
        own(*arguments)

    monkeypatch.setattr(engine, "_object_cache_notify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        double(2)
    assert len(calls) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert double(2) == 4


IN_PLACE = """
import numpy as np
from pipeline.compiled import compiled, compiled_in_place

@compiled
def counted(values):
    return len(values[1:])

@compiled_in_place
def in_place(values):
    return len(values[1:])

@compiled_in_place
def made(number):
    return len(np.zeros(number))
"""


def test_in_place_counts_no_references(path: Path) -> None:
    path.write_text(IN_PLACE)
    module = load(path)
    for function, expected in ((module.counted, True), (module.in_place, False)):
        assert function(np.arange(4)) == 3
        (code,) = function.inspect_llvm().values()
        assert ("@NRT_decref" in code) == expected
    with pytest.raises(NumbaError, match="array"):
        module.made(1)


def test_without_a_compiler_functions_are_what_they_are(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NUMBA_DISABLE_JIT=1, to look for a fault."""
    monkeypatch.setattr(config, "DISABLE_JIT", True)
    assert load(path).double(4) == 8
