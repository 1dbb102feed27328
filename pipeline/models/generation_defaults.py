"""A model folder's generation defaults, which a trained model gets back."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.models.teacher_files import find_folder, read_object
from pipeline.tokenization import Tokenizer

GENERATION_FILE, TOKENIZER_FILE = "generation_config.json", "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_FILES = ("*.json", "*.jinja")
# A .gguf file's tokenizer keys, and transformers' names for them.
_GGUF = {
    "chat_template": "",
    "ggml.tokens": "",
    "ggml.bos_token_id": "bos_token",
    "ggml.eos_token_id": "eos_token",
    "ggml.unknown_token_id": "unk_token",
    "ggml.padding_token_id": "pad_token",
}
_NOT_CARRIED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "_from_model_config"),
    "transformers_version",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationDefaults:
    """How a model generates by default.

    Attributes:
        templates: chat templates by name; most models have one, "default".
        names: special tokens, by their names in templates, such as `eos_token`; "" of one that is
            null, which templates render as nothing.
        end_ids: tokens that end its output.
        settings: others, such as `temperature`.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def chat_template(self, names: Mapping[str, str]) -> str | list[dict[str, str]] | None:
        """Return the templates for a tokenizer with possibly different special tokens.

        Example:
            >>> own = GenerationDefaults({"default": "{{ eos_token }}"}, {"eos_token": "</s>"})
            >>> own.chat_template({"eos_token": "<|endoftext|>"})
            '{%- set eos_token = "</s>" %}{{ eos_token }}'
        """
        others = {r: name for r, name in self.names.items() if names.get(r, "") != name}
        made = {}
        for title, text in self.templates.items():
            meant = {role: name for role, name in others.items() if re.search(rf"\b{role}\b", text)}
            own = (json.dumps(name, ensure_ascii=False) for name in meant.values())
            lines = [f"{{%- set {r} = {name} %}}" for r, name in zip(meant, own, strict=True)]
            made[title] = "".join((*lines, text))
        if {*made} <= {"default"}:
            return made.get("default")
        return [{"name": title, "template": text} for title, text in made.items()]


def read_generation_defaults(source: str) -> GenerationDefaults:
    """Read the defaults of a folder, a repository or a .gguf file, empty if missing."""
    if source.endswith(".gguf") and Path(source).is_file():
        return _read_gguf(Path(source))
    try:
        folder = find_folder(source, role="model", files=_FILES) if source else Path()
    except ValueError as error:
        logger.warning("chat template, further ends and sampling are left out: %s", error)
        source = ""
    if not source:
        return GenerationDefaults()
    beside = _tokenizer_folder(folder)
    generation, own = _read(folder / GENERATION_FILE), _read(beside / TOKENIZER_FILE)
    has_template = (beside / TEMPLATE_FILE).is_file()
    if not (generation or own or has_template):
        return GenerationDefaults()
    ends = generation.get("eos_token_id", _read(folder / "config.json").get("eos_token_id"))
    given = {name: value for name, value in own.items() if value is not None}
    special = dict.fromkeys(own) | _read(beside / "special_tokens_map.json") | given
    tokens = {
        role: token["content"] if isinstance(token, dict) else token or ""
        for role, token in special.items()
        if role.endswith("_token") and isinstance(token, (str, dict, type(None)))
    }
    templates = own.get("chat_template") or {}
    if isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    elif templates:
        templates = {"default": templates}
    for path in beside.glob("additional_chat_templates/*.jinja"):
        templates[path.stem] = path.read_text("utf-8")
    if has_template:
        templates["default"] = (beside / TEMPLATE_FILE).read_text("utf-8")
    return GenerationDefaults(
        templates,
        tokens,
        tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        {name: value for name, value in generation.items() if name not in _NOT_CARRIED},
    )


def _tokenizer_folder(folder: Path) -> Path:
    """Return where a model's tokenizer is: an exported model may have a folder for it."""
    own = folder / "tokenizer"
    return own if own.is_dir() and not (folder / TOKENIZER_FILE).is_file() else folder


def in_vocabulary(
    own: GenerationDefaults, old: Tokenizer, new: Tokenizer, *, num_rows: int
) -> tuple[GenerationDefaults, list[str]]:
    """Return the defaults that hold in a new vocabulary of `num_rows`, and those dropped."""
    here = {name: token for name, token in new.named_tokens.items() if token < num_rows}
    left, templates = [], {}
    named: dict[int | None, str] = {token: name for name, token in old.named_tokens.items()}
    for title, text in own.templates.items():
        called = {name for role, name in own.names.items() if re.search(rf"\b{role}\b", text)}
        # The new vocabulary's own begin and end replace these.
        called -= {named.get(old.bos_token_id), named.get(old.eos_token_id)}
        used = [name for name in old.named_tokens if name in text or name in called]
        used = [name for name in used if not old.token_bytes(old.named_tokens[name])]
        if gone := [name for name in used if name not in here]:
            left.append(f"the {title} chat template (no token {', '.join(gone)})")
        else:
            templates[title] = text
    further = [token for token in own.end_ids if token != old.eos_token_id]  # has a new one
    left += [f"the end {named.get(i, i)}" for i in further if named.get(i) not in here]
    # Lists and ids refer to old tokens.
    settings = {
        name: value
        for name, value in own.settings.items()
        if not isinstance(value, (list, dict)) and not name.endswith("_id")
    }
    left += [name for name in own.settings if name not in settings]
    names = {role: name for role, name in own.names.items() if name in here}
    ends = tuple(here[named[token]] for token in own.end_ids if named.get(token) in here)
    return GenerationDefaults(templates, names, ends, settings), left


def _read_gguf(path: Path) -> GenerationDefaults:
    from gguf import GGUFReader

    reader, start = GGUFReader(path), "tokenizer."
    said = {name: reader.fields[start + name] for name in _GGUF if start + name in reader.fields}
    found = {name: field.contents() for name, field in said.items()}
    ids = {_GGUF[name]: token for name, token in found.items() if name.endswith("_id")}
    template, end = found.get("chat_template"), ids.get("eos_token")
    return GenerationDefaults(
        {"default": template} if template else {},
        {role: found["ggml.tokens"][token] for role, token in ids.items()},
        () if end is None else (end,),
    )


def _read(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
