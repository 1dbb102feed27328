"""The files of a teacher, before any of it is loaded: which they are, their hash, their tokenizer.

No torch here: the machine that starts a job need not be one that can run the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pipeline.dataset.tokenizers import load_dataset_tokenizers
from pipeline.remote.hub import HubError, download_folder
from pipeline.tokenization import Tokenizer
from schemas.errors import ForeignTokenizerError
from schemas.manifest import Manifest, TokenizerRecord

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_HUB_FILES = ["*.json", "*.safetensors", "*.model"]
_CHUNK_BYTES = 4 << 20
# Parts of a tokenizer.json that decide nothing between a text and its own tokens.
_AROUND_TEXT = ("post_processor", "truncation", "padding", "version")

Side = Literal["student", "teacher"]


@dataclass(frozen=True)
class TeacherFiles:
    """A teacher on this machine's disk.

    Attributes:
        source: what the user named.
        path: a folder in the layout of Hugging Face, or a .gguf file.
        files: those that decide its losses: weights and configuration.
    """

    source: str
    path: Path
    files: tuple[Path, ...]

    @property
    def is_gguf(self) -> bool:
        """Whether weights, configuration and tokenizer are one file."""
        return self.path.suffix == ".gguf"

    @property
    def sha256(self) -> str:
        """64 hex digits over names and contents of the files; read once per process."""
        stats = [path.stat() for path in self.files]
        return _hash_files(self.files, tuple((s.st_size, s.st_mtime_ns) for s in stats))

    def require_tokenizer(self, folder: str, manifest: Manifest, *, side: Side = "teacher") -> None:
        """Check that a dataset's tokens are this model's.

        A folder's tokenizer must be the file that the dataset was made with; a folder that holds
        none is taken at its word. A GGUF file holds its vocabulary, which is compared token by
        token with that of a tokenizer.json.

        Args:
            folder: the dataset's.
            manifest: the dataset's.
            side: which of its two models this is.

        Raises:
            ForeignTokenizerError: the dataset was made with another tokenizer.
        """
        if self.is_gguf:
            self._require_vocabulary(folder, manifest, side)
            return
        require_tokenizer(self.path, folder, manifest, side=side)

    def _require_vocabulary(self, folder: str, manifest: Manifest, side: Side) -> None:
        tokenizer: Tokenizer = getattr(load_dataset_tokenizers(folder, manifest), side)
        if tokenizer.file.kind != "huggingface":
            return
        own = _gguf_tokens(self.path)
        for token_id, text in _vocabulary(json.loads(tokenizer.file_bytes)):
            found = own[token_id] if token_id < len(own) else None
            if found != text:
                source = getattr(manifest, side).source
                raise ForeignTokenizerError(
                    f"token {token_id} is {text!r} in the dataset's {side} tokenizer "
                    f'("{source}") and {found!r} in {self.path}: name the model '
                    "that the tokenizer belongs to, or run beam_jobs.align again with the model's"
                )


def find_teacher(source: str, *, role: str = "teacher") -> TeacherFiles:
    """Return the files of the model that a user names; a repository's are downloaded first.

    Args:
        source: a folder, a .gguf file, or a Hugging Face repository, `owner/name` or
            `owner/name@revision`.
        role: what errors call it.

    Raises:
        ValueError: nothing there, or no weights.

    Example:
        >>> find_teacher("models/qwen2_5").sha256[:8]  # doctest: +SKIP
        '5fca52b1'
    """
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return TeacherFiles(source, path, (path,))
    if not path.is_dir():
        path = _download(source, role)
    for pattern in _WEIGHTS:
        weights = sorted(path.glob(pattern))
        if weights and (path / "config.json").is_file():
            return TeacherFiles(source, path, (path / "config.json", *weights))
    raise ValueError(
        f'{role} "{source}": {path} holds no config.json with {" or ".join(_WEIGHTS)}; name a '
        "folder in the layout of Hugging Face, a repository or a .gguf file"
    )


def require_tokenizer(model: Path, folder: str, manifest: Manifest, *, side: Side) -> None:
    """Check that a model's folder holds the tokenizer of one side of a dataset, or none.

    A `tokenizer.json` may differ in what it puts around a text: an exported student's does.

    Args:
        model: the model's folder.
        folder: the dataset's.
        manifest: the dataset's.
        side: which of its two models this is.

    Raises:
        ForeignTokenizerError: it holds another.
    """
    record: TokenizerRecord = getattr(manifest, side)
    path = model / Path(record.file).name
    if not path.is_file():
        return
    data = path.read_bytes()
    digest = sha256(data).hexdigest()
    if digest == record.sha256:
        return
    own: Tokenizer = getattr(load_dataset_tokenizers(folder, manifest), side)
    if own.file.kind != "huggingface" or _text_part(data) != _text_part(own.file_bytes):
        manifest.require_tokenizers(**{f"{side}_sha256": digest})


def _text_part(data: bytes) -> Mapping[str, Any]:
    definition: dict[str, Any] = json.loads(data)
    return {name: part for name, part in definition.items() if name not in _AROUND_TEXT}


def _download(source: str, role: str) -> Path:
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise ValueError(
            f'{role} "{source}": no such folder or .gguf file, and no Hugging Face repository '
            "name (owner/name); name one of the three"
        )
    try:
        return download_folder(source, _HUB_FILES)
    except HubError as error:
        raise ValueError(f'{role} "{source}": no such folder or .gguf file, and {error}') from error


@lru_cache
def _hash_files(files: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> str:
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        digests = list(pool.map(_hash_file, files))
    content = [[path.name, digest] for path, digest in zip(files, digests, strict=True)]
    return sha256(json.dumps(content).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _gguf_tokens(path: Path) -> list[str]:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.tokens")
    return [] if field is None else [str(token) for token in field.contents()]


def _vocabulary(definition: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield ids and texts of a tokenizer.json, added tokens included."""
    vocabulary = definition["model"]["vocab"]
    if isinstance(vocabulary, dict):
        yield from ((token_id, text) for text, token_id in vocabulary.items())
    else:  # Unigram: text and score, by id
        yield from ((token_id, entry[0]) for token_id, entry in enumerate(vocabulary))
    yield from ((entry["id"], entry["content"]) for entry in definition.get("added_tokens", ()))
