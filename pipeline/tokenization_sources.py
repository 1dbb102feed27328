"""Find a tokenizer's file: a Hugging Face repository, a folder, or a file.

Only two kinds of file are accepted: `tokenizer.json` (Hugging Face `tokenizers`) and SentencePiece
models. They are read directly: the loader classes of `transformers` silently change some
tokenizers (its 5.x `LlamaTokenizer` discards the normaliser, for one).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

Kind = Literal["huggingface", "sentencepiece"]
HUB_FILES = ("tokenizer.json", "tokenizer.model")


class TokenizerError(ValueError):
    """A tokenizer cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer's file as found.

    Attributes:
        source: what the user named.
        kind: which library reads it.
        data: the file's bytes.
    """

    source: str
    kind: Kind
    data: bytes

    @property
    def file_name(self) -> str:
        """The name under which a dataset keeps its copy."""
        return HUB_FILES[0] if self.kind == "huggingface" else HUB_FILES[1]


def find_tokenizer(source: str) -> TokenizerFile:
    """Read the tokenizer that a user names.

    Args:
        source: a `tokenizer.json`, a SentencePiece model, a folder that holds one, or a Hugging
            Face repository, `owner/name` or `owner/name@revision`.

    Raises:
        TokenizerError: nothing there, or nothing that can give offsets.

    Example:
        >>> find_tokenizer("models/llama2").kind
        'huggingface'
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _read(source, _file_in_folder(path))
    if path.is_file():
        return _read(source, path)
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _read(source, _download(source))
    raise TokenizerError(
        f'tokenizer "{source}": no such file or folder, and no Hugging Face repository name '
        "(owner/name); name one of the three"
    )


def _file_in_folder(folder: Path) -> Path:
    names = sorted(entry.name for entry in folder.iterdir())
    for name in HUB_FILES:
        if name in names:
            return folder / name
    models = [name for name in names if ".model" in name]
    if len(models) == 1:
        return folder / models[0]
    raise TokenizerError(
        f'tokenizer folder "{folder}" has no tokenizer.json and {len(models)} SentencePiece models '
        f"among {names[:12]}: a slow tokenizer gives no offsets; convert it with "
        "AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…) or name one file"
    )


def _download(source: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    repository, _, revision = source.partition("@")
    try:
        try:
            found = hf_hub_download(repository, HUB_FILES[0], revision=revision or None)
        except EntryNotFoundError:
            found = hf_hub_download(repository, HUB_FILES[1], revision=revision or None)
    except Exception as error:  # the hub client raises many unrelated types
        raise TokenizerError(
            f'tokenizer "{source}": no such file or folder, and the Hugging Face hub gave no '
            f"tokenizer.json or tokenizer.model ({type(error).__name__}: {error}); check the name, "
            "the network, or HF_TOKEN for a gated repository"
        ) from error
    return Path(found)


def _read(source: str, path: Path) -> TokenizerFile:
    data = path.read_bytes()
    if data[:64].lstrip()[:1] not in (b"{", b"["):
        return TokenizerFile(source, _binary_kind(source, path), data)
    try:
        body = orjson.loads(data)
    except ValueError as error:
        raise TokenizerError(f'tokenizer "{path}" is no valid JSON: {error}') from error
    if not isinstance(body, dict) or not isinstance(body.get("model"), dict):
        raise TokenizerError(
            f'tokenizer "{path}" is JSON but no tokenizer.json (no "model"): convert it to the '
            "Hugging Face format, whose library reports offsets"
        )
    return TokenizerFile(source, "huggingface", data)


def _binary_kind(source: str, path: Path) -> Kind:
    if ".model" in path.name:
        return "sentencepiece"
    raise TokenizerError(
        f'tokenizer "{source}": {path.name} is neither a tokenizer.json nor a SentencePiece .model '
        "file; rank files such as .tiktoken carry no pre-tokenizer, so convert it with transformers"
    )
