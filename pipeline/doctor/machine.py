"""The machine: cores, memory, GPUs, fast path, caches."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.remote.user_cache import cache_folder

GPU_SECONDS = 60
"""A hanging driver must not hang this command."""

_ASK_TORCH = "from pipeline.doctor.torch_answers import print_answers; print_answers()"


def describe_machine() -> dict[str, Any]:
    """Return available cores, bytes of memory and free bytes of disk."""
    memory, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _memory_limit()
    bound = hasattr(os, "sched_getaffinity")  # not on a Mac
    return {
        "cores": len(os.sched_getaffinity(0)) if bound else os.cpu_count(),
        "memory_bytes": memory if limit is None else min(memory, limit),
        "disk_free_bytes": shutil.disk_usage(".").free,
    }


def describe_gpu(seconds: float = GPU_SECONDS) -> dict[str, Any]:
    """Return the GPUs that torch, in its own process, sees, or `problem`."""
    if find_spec("torch") is None:
        return {"devices": [], "problem": "torch is not installed"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        reason = f"torch did not answer in {seconds:g} s: look at the driver, nvidia-smi"
        return {"devices": [], "problem": reason}
    if done.returncode:
        last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        return {"devices": [], "problem": f"torch can't be imported: {last}"}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def describe_fast_path() -> dict[str, Any]:
    """Return whether fastokens agrees with the reference here."""
    try:
        from pipeline.tokenization import load_tokenizer
        from pipeline.tokenization.rank_models import BYTES
    except ImportError as error:
        return {"works": False, "problem": str(error)}
    reason = load_tokenizer(BYTES.name).slow_reason
    return {"works": reason is None} | ({"problem": reason} if reason else {})


def describe_caches() -> dict[str, int]:
    """Return existing cache folders' bytes, by path."""
    own = Path(os.path.expanduser("~/.cache/vocag"))  # Path.home raises where no home is known
    roots = {cache_folder("x").parent, own}
    folders = {each for root in roots if root.is_dir() for each in root.iterdir() if each.is_dir()}
    if find_spec("huggingface_hub"):
        from huggingface_hub.constants import HF_HUB_CACHE

        folders.add(Path(HF_HUB_CACHE))
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        folders.add(Path(named))
    return {str(each): _folder_bytes(each) for each in sorted(folders) if each.is_dir()}


def _folder_bytes(folder: Path) -> int:
    files = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return sum(file.stat().st_size for file in files if not file.is_symlink() and file.is_file())


def _memory_limit() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup", name)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return int(text)
    return None
