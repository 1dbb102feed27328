"""A dataset's tokenizer next to an exported model, checked to give the dataset's ids.

Some loader classes of `transformers` silently change a tokenizer. So a `tokenizer.json` with a
neutral class is loaded by `AutoTokenizer`, and ids are compared on the dataset's texts.
"""

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from transformers import AutoTokenizer, PreTrainedModel

from pipeline.chats.habits import habits_of
from pipeline.dataset.chat_templates import load_speakers
from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import find_text, load_dataset_tokenizer
from pipeline.models.generation_defaults import GENERATION_FILE, TOKENIZER_FILE, GenerationDefaults
from pipeline.models.weights import generate_plainly
from pipeline.tokenization import PROBES, Tokenizer, TokenizerError
from pipeline.tokenization.conversion import convert_sentencepiece
from pipeline.tokenization.definition import (
    PAD_NAMES,
    Definition,
    control_tokens,
    read_template,
    text_template,
    token_names,
)
from pipeline.tokenization.sentencepiece_files import gives_ids, sentencepiece_file
from schemas.document import decode_document
from schemas.manifest import TokenizerRecord

_MAX_PROVEN, _MAX_PROVEN_BYTES = 200, 8 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportedTokenizer:
    """Files to write next to a model, and the texts on which they were checked.

    Attributes:
        files: contents by path in the model's folder.
        num_documents: documents with equal ids.
        differing_probes: hard texts whose ids differ, none of them in these documents.
        token_ids: of the model's configuration; None for missing ones.
    """

    files: Mapping[str, bytes]
    num_documents: int = 0
    differing_probes: Sequence[str] = ()
    token_ids: Mapping[str, int | list[int] | None] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the files into a model's folder, and token ids into its configuration."""
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        if (config := folder / "config.json").is_file():
            body = json.loads(config.read_bytes()) | dict(self.token_ids)
            if isinstance(body.get("text_config"), dict):  # what multimodal models read
                body["text_config"] |= self.token_ids
            config.write_bytes(_dump(body))

    def __str__(self) -> str:
        return f"tokenizer: ids equal on {self.num_documents} documents"


def save_model(model: PreTrainedModel, tokenizer: ExportedTokenizer, folder: Path) -> None:
    """Write a model and its tokenizer's files, the model's generation defaults among them."""
    generate_plainly(model)
    model.save_pretrained(folder)
    share_weights(folder)
    tokenizer.write(folder)


def share_weights(folder: Path) -> None:
    """Let those read a model's weights who may read its configuration.

    safetensors 0.8 lets only their owner, whatever the umask is.
    """
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)


class KnownText(NamedTuple):
    """A text, its place, and its own tokenizer's ids."""

    place: str
    text: str
    ids: list[int]


def export_tokenizer(
    dataset: Dataset,
    *,
    config: Mapping[str, Any],
    record: TokenizerRecord | None = None,
    defaults: GenerationDefaults | None = None,
) -> ExportedTokenizer:
    """Make the student's tokenizer for `transformers` and prove it on 200 of the dataset's texts.

    A `record` of `choose_conventions` has other tokens around a text. ForeignTokenizerError for an
    altered copy; else as `convert_tokenizer`.
    """
    record = record or dataset.manifest.student
    if dataset.manifest.chats is not None:  # around a text, the tokenizer's own tokens
        record = replace(record, convention=None)
        defaults = _as_in(dataset, defaults or GenerationDefaults())
    own = load_dataset_tokenizer(dataset, "student")
    known = list(_known_documents(dataset, own))
    return convert_tokenizer(own, record, known, config=config, defaults=defaults)


def _as_in(dataset: Dataset, defaults: GenerationDefaults) -> GenerationDefaults:
    """Use the learned template and end of a turn."""
    (speaker, _), _ = load_speakers(dataset)
    template, ids = speaker.template, load_dataset_tokenizer(dataset, "student").named_tokens
    usual = habits_of(speaker).end
    ends = sorted((usual.find(name), ids[name]) for name in speaker.controls if name in usual)
    return replace(
        defaults,
        templates={**defaults.templates, "default": template.text},
        names={**defaults.names, **template.names},
        end_ids=tuple(dict.fromkeys((*defaults.end_ids, *(token for _, token in ends[:1])))),
    )


def convert_tokenizer(
    own: Tokenizer,
    record: TokenizerRecord,
    known: Iterable[KnownText],
    *,
    config: Mapping[str, Any],
    defaults: GenerationDefaults | None,
) -> ExportedTokenizer:
    """Make a tokenizer for `transformers`; TokenizerError if ids differ on a known text."""
    defaults = defaults or GenerationDefaults()
    definition, names = _definition(own, record)
    special = _special_ids(names, record, num_rows=config.get("vocab_size", sys.maxsize))
    ends = _ends(special.get("eos"), defaults, names)
    special |= {"eos": ends[0]} if ends else {}
    before = _before(record)
    # In a text, transformers reads these as control tokens, as a prompt needs; the dataset reads
    # them as plain text, so no document can forge one. Such texts can't be equal.
    plain = record.special_strings == "plain"
    control = tuple(control_tokens(definition)) if plain else ()
    documents = [text for text in known if not any(name in text.text for name in control)]
    if not documents:
        logger.warning(
            "no text is known that %s has tokenized: the exported tokenizer is proven on probe "
            "texts only",
            record.source,
        )
    settings: dict[str, Any] = {
        f"{name}_token": names[token_id] for name, token_id in special.items()
    }
    # This class leaves the file unchanged, in transformers 4 and 5.
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    template = defaults.chat_template(settings)
    settings |= {"chat_template": template} if template else {}
    files = {
        "tokenizer.json": orjson.dumps(definition),
        TOKENIZER_FILE: _dump(settings | {"clean_up_tokenization_spaces": False}),
    }
    if scores := _sentencepiece_file(own, definition, documents):
        files["tokenizer.model"] = scores
    folder, loaded = _load_as_proven(files, config, documents, before)
    probes = [text for text in PROBES if not any(name in text for name in control)]
    batch = own.tokenize_batch([text.encode() for text in probes])
    of_probes = np.split(batch.input_ids, batch.cu_tokens[1:-1])
    differing = [
        text
        for place, (text, ids) in enumerate(zip(probes, of_probes, strict=True))
        if place not in batch.failures
        and _difference(loaded, KnownText("", text, ids.tolist()), before) is not None
    ]
    if differing:
        logger.warning(
            "the exported tokenizer splits %d of %d probe texts differently from the dataset's "
            "(none of its %d compared documents): %s",
            len(differing),
            len(PROBES),
            len(documents),
            [text[:40] for text in differing],
        )
    ids = special | ({"eos": ends} if len(ends) > 1 else {})
    token_ids = {f"{name}_token_id": ids.get(name) for name in ("bos", "eos", "pad")}
    generation = {name: value for name, value in token_ids.items() if value is not None}
    written = {str(Path(folder, name)): data for name, data in files.items()}
    written[GENERATION_FILE] = _dump({**defaults.settings, **generation})
    return ExportedTokenizer(written, len(documents), differing, token_ids)


def _sentencepiece_file(
    own: Tokenizer, definition: Definition, documents: Sequence[KnownText]
) -> bytes | None:
    """A SentencePiece model with every document's ids, or None.

    llama.cpp's converter takes the order of merges from it.
    """
    is_one = own.file.kind == "sentencepiece"
    data = own.file_bytes if is_one else sentencepiece_file(definition)
    if data is None or not documents:
        return None
    return data if gives_ids(data, ((known.text, known.ids) for known in documents)) else None


def _ends(own: int | None, defaults: GenerationDefaults, names: Mapping[int, str]) -> list[int]:
    """The tokens that end a text, the rows' first."""
    called = defaults.names.get("eos_token") or None
    further = (*defaults.end_ids, *(token for token, name in names.items() if name == called))
    return [*dict.fromkeys(token for token in (own, *further) if token is not None)]


def _load_as_proven(
    files: Mapping[str, bytes],
    config: Mapping[str, Any],
    documents: Sequence[KnownText],
    before: Sequence[int],
) -> tuple[str, Any]:
    """Return the subfolder in which the files load correctly, and the loaded tokenizer.

    Next to a config.json the model's architecture chooses the class.
    """
    settings = {"config.json": json.dumps(dict(config), default=str).encode()}
    beside = _load({**files, **settings})
    changed = _first_difference(beside, documents, before)
    if not changed:
        return "", beside
    alone = _load(files)
    if differs := _first_difference(alone, documents, before):
        raise TokenizerError(
            f"{differs}: use the dataset's own file, and export the model without a tokenizer"
        )
    logger.warning(
        "transformers would change the tokenizer next to a %s model (%s): it is in the folder "
        '"tokenizer" of the model instead; name that folder (tokenizer= in lm-eval, '
        "--tokenizer in vLLM)",
        config.get("model_type"),
        changed,
    )
    return "tokenizer", alone


def _load(files: Mapping[str, bytes]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _definition(own: Tokenizer, record: TokenizerRecord) -> tuple[Definition, dict[int, str]]:
    if own.file.kind == "sentencepiece":
        definition = convert_sentencepiece(own.file_bytes, source=record.source)
    else:
        definition = orjson.loads(own.file_bytes)
    names = token_names(definition)
    ids = {name: token_id for token_id, name in names.items()}
    before, after = read_template(definition.get("post_processor"), ids) or ([], [])
    wanted = _before(record)
    if before != wanted or after:  # a prompt goes on: no end behind it (RoBERTa, T5)
        definition = definition | {"post_processor": text_template(wanted, [], names)}
    return definition, names


def _before(record: TokenizerRecord) -> list[int]:
    """The ids before a text.

    Without BOS (Qwen), rows begin with the end token; a prompt needs none.
    """
    first, end = record.around_text.first_token_id, record.around_text.end_token_id
    return [] if first is None or first == end else [first]


def _special_ids(
    names: Mapping[int, str], record: TokenizerRecord, *, num_rows: int
) -> dict[str, int]:
    first, end = record.around_text.first_token_id, record.around_text.end_token_id
    eos = record.eos_token_id if end is None else end
    bos = record.bos_token_id
    # Evaluations begin a text with BOS, or EOS: it must be the first token of texts in training.
    if first is not None and (bos is not None or first != eos):
        bos = first
    own = {name: token_id for token_id, name in names.items() if token_id < num_rows}
    pad = next((own[name] for name in PAD_NAMES if name in own), eos)  # EOS is masked like it
    ids = {"bos": bos, "eos": eos, "pad": pad}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _dump(body: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(body, indent=2, ensure_ascii=False, sort_keys=True)}\n".encode()


def _first_difference(loaded: Any, documents: Iterable[KnownText], before: Sequence[int]) -> str:
    for known in documents:
        place = _difference(loaded, known, before)
        if place is not None:
            return (
                f"the dataset's tokenizer, exported for transformers as {type(loaded).__name__}, "
                f"gives different ids from the dataset's for {known.place}, from token {place} on"
            )
    return ""


def _difference(loaded: Any, known: KnownText, before: Sequence[int]) -> int | None:
    found = loaded(known.text, add_special_tokens=False)["input_ids"]
    if found == known.ids:
        around = loaded(known.text)["input_ids"]
        return None if around == [*before, *found] else 0
    pairs = zip(found, known.ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(found), len(known.ids)))


def _known_documents(dataset: Dataset, own: Tokenizer) -> Iterator[KnownText]:
    shards = dataset.manifest.shards[:_MAX_PROVEN]
    each = -(-_MAX_PROVEN // max(len(shards), 1))
    num_bytes = 0
    for number, record in enumerate(shards):
        index = dataset.read_index(number, with_names=True)
        for _, sample in islice(dataset.samples(number, index), each):
            document = decode_document(sample)
            num_bytes += document.num_text_bytes
            if num_bytes > _MAX_PROVEN_BYTES:
                return
            # Kept, or spelled by its student tokens and proven by its hash.
            text = find_text(document, {"student": lambda: own})
            if document.chat is not None and text is not None:
                text = document.chat.student.render(text)
            if text is not None:
                place = f"document {json.dumps(document.document_id)} of {record.file}"
                yield KnownText(place, text.decode(), document.student.input_ids.tolist())
