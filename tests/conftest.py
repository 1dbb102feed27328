import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock
from hypothesis import settings

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # read when huggingface_hub is imported; no test downloads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models are tiny, and several processes of several threads each wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if hasattr(signal, "SIGHUP"):  # else under nohup the jobs that tests start ignore it, too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None)  # other examples each time: for finding bugs
settings.load_profile("tests")

ENOUGH_BYTES = 5 << 28
"""What a process may hold at the end of a test, so that it stays below 2 GB in the next."""

_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
if hasattr(_LIBC, "mallopt"):
    # glibc keeps what was freed, in an area for each of many threads, and more once blocks were
    # large: here two areas (M_ARENA_MAX), and blocks of 1 MiB or more go back at once
    # (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD).
    for option, value in ((-8, 2), (-1, 1 << 20), (-3, 1 << 20)):
        _LIBC.mallopt(option, value)


class _Loggers(dict[str, Any]):
    """Loggers by name, of which pytest 9.2 reads all at each test, while threads may make some."""

    def values(self) -> Any:
        return tuple(super().values())


logging.root.manager.loggerDict = _Loggers(logging.root.manager.loggerDict)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put a file's tests of one real tokenizer side by side: each is loaded once, and forgotten."""
    files = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}

    def place(item: pytest.Item) -> tuple[int, str]:
        return files[item.path], _real_tokenizer(item)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Look no more at what imports have made: each later collection would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Undo it: extensions complain of what is left at the end."""
    gc.unfreeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget the tokenizers that caches hold once memory is short, and give it back.

    What the tests import takes 1.1 GB; the large tokenizers take 40 to 400 MB and one or two
    seconds each, so the next test's stays.
    """
    if psutil.Process().memory_info().rss < ENOUGH_BYTES:
        return
    ends = nextitem is None or nextitem.path != item.path
    if not ends and _real_tokenizer(item) and _real_tokenizer(item) == _real_tokenizer(nextitem):
        return
    held = list(_caches(vars(item.module) if ends and isinstance(item, pytest.Function) else {}))
    if ends or any(cached.cache_info().currsize for cached in held):
        for cached in held:
            cached.cache_clear()
        gc.collect()
        getattr(_LIBC, "malloc_trim", int)(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]


@pytest.fixture(scope="session", params=[pytest.param("cuda", marks=pytest.mark.gpu), "stand-in"])
def gpu(request: pytest.FixtureRequest) -> str:
    """The GPU's name; or the CPU's, so that what a GPU would run is run everywhere.

    A test that asks for it is two: one is marked `gpu`.
    """
    import torch

    if request.param == "stand-in":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, the teacher that has scored it, and a student: to read; `copied` is to change."""
    from tests.support.scored_data import run_score, write_world  # Beam and torch: seconds

    root = write_world(tmp_path_factory.mktemp("world"))
    run_score(root)
    return root


@pytest.fixture(scope="session")
def taught(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with what the teacher expects next next to its losses, 8 tokens in fp16."""
    from tests.support.scored_data import run_score

    ignored = shutil.ignore_patterns("plans", "*teacher-*")
    root = shutil.copytree(world, tmp_path_factory.mktemp("taught") / "world", ignore=ignored)
    run_score(root, "--top-k", "8", "--draws", "0", "--top-log-probs", "float16")
    return root


@pytest.fixture(scope="session")
def drawn(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world with draws of what 4 tokens leave out."""
    from tests.support.scored_data import run_score

    ignored = shutil.ignore_patterns("plans", "*teacher-*")
    root = shutil.copytree(taught, tmp_path_factory.mktemp("drawn") / "world", ignore=ignored)
    run_score(root, "--top-k", "4", "--draws", "3", "--top-log-probs", "float16")
    return root


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, which a package carries; written once for all processes, to read."""
    pytest.importorskip("gguf", reason="needs vocag[packaged-teacher]")
    from packaged_model import INSTALL, find_gguf, write_smollm2

    if find_gguf() is None:
        pytest.skip(" ".join(INSTALL))
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "smollm2"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            write_smollm2(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture
def copied(world: Path, tmp_path: Path) -> Path:
    """A world of the test's own."""
    return shutil.copytree(world, tmp_path / "world", ignore=shutil.ignore_patterns("plans"))


@pytest.fixture
def unscored(world: Path, tmp_path: Path) -> Path:
    """The same before any teacher has scored it."""
    ignored = shutil.ignore_patterns("plans", "*teacher-*")
    return shutil.copytree(world, tmp_path / "unscored", ignore=ignored)


@pytest.fixture(autouse=True)
def _restore_log_level() -> None:
    """Undo what a command said about the process's log, in an earlier test or a shared fixture.

    `vocag align --quiet` silences the root logger, and with it what a later test looks for.
    """
    logging.getLogger().setLevel(logging.WARNING)


def _real_tokenizer(item: pytest.Item | None) -> str:
    """Return the name of the real tokenizer that a test is about, or an empty string."""
    zoo = sys.modules.get("tests.support.tokenizer_zoo")
    spec = getattr(item, "callspec", None)
    name = spec.params.get("name") if spec else None
    return name if zoo is not None and isinstance(name, str) and zoo.is_real(name) else ""


def _caches(module: dict[str, Any]) -> Iterator[Any]:
    """Yield the caches of a test module, and those that hold large tokenizers."""
    name = module.get("__name__")
    yield from (v for v in module.values() if hasattr(v, "cache_clear") and v.__module__ == name)
    large = {"tests.support.tokenizer_zoo": "load_real", "pipeline.dataset.tokenizers": "_load"}
    yield from (vars(sys.modules[place])[v] for place, v in large.items() if place in sys.modules)
