"""Find and hash a model's files, without torch."""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import file_digest, sha256
from os.path import expanduser
from pathlib import Path
from typing import Any

from pipeline.command_line.failures import hinted
from pipeline.command_line.git_lfs import POINTER_BYTES, refuse_pointer
from pipeline.command_line.nearest import look_near, nearest
from pipeline.remote.hub import HubError, download_folder, may_be_repository

_TENSORS, _PICKLES = "*.safetensors", "pytorch_model*.bin"
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja")


class BrokenFileError(ValueError):
    """A file of a model is missing, cut or malformed."""


@dataclass(frozen=True)
class TeacherFiles:
    """A model's folder or .gguf file, and the files that decide its losses."""

    source: str
    path: Path
    files: tuple[Path, ...]

    @cached_property
    def sha256(self) -> str:
        """64 hex digits over the files' names and contents."""
        return digest_of_files(self.files)


def digest_of_files(files: Sequence[Path]) -> str:
    """Hash file names, without folders, and contents, in order."""
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, files))
    content = [[path.name, digest] for path, digest in zip(files, digests, strict=True)]
    return sha256(json.dumps(content).encode()).hexdigest()


def find_teacher(source: str, *, role: str = "teacher") -> TeacherFiles:
    """Return the files of a folder, a .gguf file or a downloaded repository.

    A repository is `owner/name` or `owner/name@revision`. ValueError, which names `role`, without
    weights, or for Git LFS pointers.
    """
    path = Path(expanduser(source))
    if path.suffix == ".gguf" and path.is_file():
        _require_content((path,))
        return TeacherFiles(source, path, (path,))
    path = find_folder(source, role=role)
    weights = sorted(path.glob(_TENSORS))
    if not any(path.glob("model*.safetensors")):  # else transformers reads no others
        weights += sorted(path.glob(_PICKLES))
    if weights and (path / "config.json").is_file():
        _require_content(weights)
        return TeacherFiles(source, path, (path / "config.json", *weights))
    raise _missing(
        f'{role} "{source}": {path} holds no config.json with {_TENSORS} or {_PICKLES}; name a '
        "folder in the layout of Hugging Face, a repository or a .gguf file",
        str(path),
    )


def find_folder(source: str, *, role: str = "teacher", files: Sequence[str] = _HUB_FILES) -> Path:
    """Return a folder, or a repository's after downloading `files`; see `find_teacher`."""
    path = Path(expanduser(source))
    if path.is_dir():
        _require_content(file for pattern in _HUB_FILES for file in sorted(path.glob(pattern)))
        return path
    if path.is_file():
        raise ValueError(
            f'{role} "{source}" is a file: name a folder in the layout of Hugging Face, or a '
            "repository"
        )
    failure, why = None, "not a Hugging Face repository name (owner/name): name one of them"
    if may_be_repository(source, with_owner=True):
        try:
            return download_folder(source, files)
        except HubError as error:
            failure, why = error, str(error)
    told = f'{role} "{source}": no such folder or .gguf file, and {why}'
    hints = failure is None or nearest(source)  # else the hub's own hint is the last line
    raise (_missing(told, source) if hints else ValueError(told)) from failure


def read_object(path: Path) -> dict[str, Any]:
    """Read a file's JSON object; BrokenFileError for anything else."""
    data = path.read_bytes()
    if json.detect_encoding(data) != "utf-8":  # json knows more than transformers
        raise BrokenFileError(f"{path} isn't plain UTF-8: save it so, without a byte-order mark")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenFileError(f"{path} isn't JSON ({error}): download it again") from error
    if not isinstance(found, dict):
        raise BrokenFileError(f"{path} holds no JSON object: download it again")
    return found


def _missing(message: str, path: str) -> ValueError:
    return hinted(ValueError(message), look_near(path))


def _require_content(files: Iterable[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            refuse_pointer(str(file), opened.read(POINTER_BYTES))


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return file_digest(file, "sha256").hexdigest()
