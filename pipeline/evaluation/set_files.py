"""The nine sets' files: a user's folder, or math-evaluation-harness's at one commit.

The harness drew its items of MathQA and TabMWP at random: only it has the paper's sets.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any

import fsspec

from pipeline.command_line.failures import hinted
from pipeline.command_line.nearest import look_near
from pipeline.command_line.pasted import pasted
from pipeline.evaluation.sets import SETS, Item, make_items
from pipeline.remote.first_contact import require_answer
from pipeline.remote.user_cache import cache_folder, keep

COMMIT = "db77bc6bb2a17c90ed2d63e88ebd8c40a82858c5"
HARNESS = f"https://raw.githubusercontent.com/ZubinGou/math-evaluation-harness/{COMMIT}/data"

BLOBS = {
    "gsm8k": "3e6e62b831b5fcbf0585d0dce75ccc5e4ccb691c",
    "math": "87d7931a3fa757e3bac4602e5bed86d223944e59",
    "svamp": "4bf27bca0eaa5c641c288c9f08da822bf330e37b",
    "asdiv": "8ab1df3b44f76a9a793b81b664ffc62954fd1d4c",
    "mawps": "c8993aec190a715ade7d66e6c78063b5823d4866",
    "tabmwp": "c686337440fecd60c23d3413d0a3acdb436f6180",
    "mathqa": "61b5b7e11214a37eb8d3352ff06fc741d124999a",
    "mmlu_stem": "855b0a4be48552631f5da8dfd15f19bdd6dd8d9b",
    "sat_math": "085cada59f097d1b62ae6c20765fd7af9c846402",
}
"""git's hashes of the harness's files."""


class MissingSetError(ValueError):
    """A folder lacks a set's file."""


@lru_cache(maxsize=16)
def read_items(name: str, data: str) -> tuple[Item, ...]:
    """Return the items of a set, one of `SETS`.

    `data` is a folder with NAME.jsonl or NAME/test.jsonl; "" downloads the harness's files once.

    Raises:
        ValueError: a missing or malformed file.
        NoAnswerError: the network doesn't answer.
    """
    content, path = _read(name, data)
    try:
        rows = list(_parse(content.removeprefix(BOM_UTF8)))
        whole = name == "math_full" or path.endswith("math500.jsonl")
        return tuple(make_items(name, rows, whole=whole))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse(content: bytes) -> Iterator[Any]:
    num_rows = 0
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"line {number} isn't UTF-8 ({error}): save it as UTF-8"
                ) from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} isn't JSON ({error})") from error
            num_rows += 1
    if not num_rows:
        raise ValueError("it holds no item: write one a line, or leave the set out of tasks=")


def describe_data(name: str, data: str) -> dict[str, Any]:
    """Return a set's path and SHA-256, and whether it is the harness's file."""
    content, path = _read(name, data)
    return {
        "path": path,
        "sha256": sha256(content).hexdigest(),
        "as_harness": git_blob(content) == BLOBS.get(SETS[name].file),
    }


def git_blob(content: bytes) -> str:
    """Return git's hash of a file.

    Example:
        >>> git_blob(b"")
        'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _read(name: str, data: str) -> tuple[bytes, str]:
    file = SETS[name].file
    if not data:
        if file not in BLOBS:
            raise ValueError(f"tasks={name} needs data= and a folder with your own {file}.jsonl")
        return _download(name)
    names = [f"{file}.jsonl", f"{file}/test.jsonl"]
    if name == "math":
        names.insert(0, "math500.jsonl")
    for path in (Path(data, name) for name in names):
        if path.is_file():
            return path.read_bytes(), str(path)
    if Path(data).is_file():
        error = ValueError(f"data={data} is a file: give the folder that has {' or '.join(names)}")
        raise hinted(error, f"data={pasted(str(Path(data).parent))}")
    none = f"neither {' nor '.join(names)} is there; tasks= can leave sets out"
    missing = MissingSetError(f"data={data}: {none}")
    raise hinted(missing, look_near(data))


def _download(name: str) -> tuple[bytes, str]:
    """Return the harness's file, cached and checked by its hash."""
    file = SETS[name].file
    url = f"{HARNESS}/{file}/test.jsonl"
    cached = cache_folder("evaluation") / COMMIT / f"{file}.jsonl"
    if cached.is_file() and git_blob(content := cached.read_bytes()) == BLOBS[file]:
        return content, url
    require_answer(url)
    try:
        with fsspec.open(url, "rb") as opened:
            content = opened.read()
    except (OSError, ImportError) as error:
        raise ValueError(
            f"{url} can't be read ({error}): give data= with a folder of the nine sets' files, "
            "such as data in a clone of math-evaluation-harness"
        ) from error
    if git_blob(content) != BLOBS[file]:
        raise ValueError(f"{url} is not the file of that commit: did a proxy change it?")
    keep(cached, content.decode())
    return content, url
