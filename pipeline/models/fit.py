"""Check that a model belongs to a dataset, without torch.

The machine that starts a job may be unable to run the model.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from os.path import expanduser
from pathlib import Path
from shlex import join
from typing import Any

from pipeline.command_line.failures import hinted
from pipeline.command_line.pasted import pasted
from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import Side, load_dataset_tokenizer
from pipeline.models.teacher_files import TeacherFiles, find_teacher
from pipeline.packing.opening import OpenedRun
from pipeline.remote.hub import may_be_repository
from pipeline.tokenization import Tokenizer, load_tokenizer
from pipeline.tokenization.conversion import read_sentencepiece_model
from pipeline.tokenization.definition import control_tokens, token_names
from pipeline.tokenization.sources import HUB_FILES
from schemas.document import decode_document
from schemas.errors import ForeignTokenizerError
from schemas.manifest import TokenizerRecord

# Parts of a tokenizer.json that don't change a text's own tokens.
_AROUND_TEXT = ("post_processor", "truncation", "padding", "version")


def require_tokenizer(model: Path, dataset: Dataset, *, side: Side) -> None:
    """Raise ForeignTokenizerError unless a folder's or .gguf file's tokens are a dataset's.

    A folder's tokenizer must be the dataset's file, apart from the tokens around a text; one of
    another kind must agree on nine of ten ids; a folder without one passes. GGUF vocabularies must
    be equal, those of SentencePiece models to nine tenths.
    """
    record: TokenizerRecord = getattr(dataset.manifest, side)
    name = Path(record.file).name
    if _holds(model, record):
        return
    found = next((each for each in (name, *HUB_FILES) if (model / each).is_file()), None)
    if found is None and model.suffix != ".gguf":
        return
    own = load_dataset_tokenizer(dataset, side)
    if found is None:
        _require_gguf_tokens(model, own, f'{side} tokenizer ("{record.source}")')
    elif not _is_alike(model / found, own, is_own_file=found == name):
        try:
            dataset.manifest.require_tokenizers(**{f"{side}_sha256": _digest(model / found)})
        except ForeignTokenizerError as error:
            remedy = _remedy(model, dataset, side)
            raise (hinted(error, remedy) if remedy else error) from None


def _remedy(model: Path, dataset: Dataset, side: Side) -> str:
    record: TokenizerRecord = getattr(dataset.manifest, side)
    source = record.source.removesuffix(f"/{Path(record.file).name}")  # the model's folder
    folder = Path(expanduser(source))  # of that name, but from here it may be another
    is_known = may_be_repository(source, with_owner=True) and not folder.exists()
    found = [f"{side}={pasted(source)}"] if is_known or _holds(folder, record) else []
    if dataset.manifest.chats is None:  # else no input of vocag align
        to = dataset.location.rstrip("/")
        words = ["vocag", "align", "--input", to, f"--{side}", str(model), "--output", f"{to}-2"]
        found.append(join(words))
    return "  # or ".join(found)


def _holds(folder: Path, record: TokenizerRecord) -> bool:
    file = folder / Path(record.file).name
    return file.is_file() and _digest(file) == record.sha256


def _is_alike(path: Path, own: Tokenizer, *, is_own_file: bool) -> bool:
    if is_own_file:
        return own.file.kind == "huggingface" and _text_part(path.read_bytes()) == _text_part(
            own.file_bytes
        )
    other = load_tokenizer(str(path), fast=False, proven=True)
    size = min(own.vocab_size, other.vocab_size)
    return sum(own.token_bytes(i) == other.token_bytes(i) for i in range(size)) >= 0.9 * size


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def find_fitting(source: str, dataset: Dataset, *, side: Side) -> TeacherFiles:
    """Return a model's files after `require_tokenizer`; see `find_teacher`."""
    files = find_teacher(source, role=side)
    require_tokenizer(files.path, dataset, side=side)
    return files


def require_room(
    opened: OpenedRun,
    source: str,
    *,
    side: Side,
    vocab_size: int,
    seq_length: int = 0,
    max_length: int | None = None,
    remedy: str = "",
) -> None:
    """Raise ValueError if a model's vocabulary or length is too small for rows.

    The data's largest token counts: a tokenizer may name more tokens than its model has rows (Gemma
    3 1B, CodeLlama-Python). `remedy` says how to shorten a row.
    """
    record: TokenizerRecord = getattr(opened.manifest, side)
    ends = vars(record.around_text).values()
    largest, place = max((token for token in ends if token is not None), default=-1), "around texts"
    for each in opened.datasets if largest < vocab_size < record.vocab_size else ():
        largest, place = _first_beyond(each.dataset, record, side, vocab_size) or (largest, place)
    if largest >= vocab_size:
        raise ValueError(
            f"the data holds {side} token {largest} {place} (tokenizer {record.source}), {source} "
            f"has rows for {vocab_size} tokens, 0 … {vocab_size - 1}: it needs a model with more "
            f"rows, or to be aligned with the tokenizer of {source}"
        )
    if max_length is not None and seq_length > max_length:
        raise ValueError(
            f"a row holds {seq_length} {side} tokens, {source} was made for {max_length}: {remedy}"
        )


def short_length(config: Any) -> int | None:
    """Return the length beyond which one document changes how a batch's positions are read.

    None without `longrope` (Phi-3's 128k).
    """
    found = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for rotation in (found, *found.values()):  # one, or one for each kind of layers
        if isinstance(rotation, dict) and rotation.get("rope_type") == "longrope":
            return int(rotation["original_max_position_embeddings"])
    return None


def _first_beyond(
    dataset: Dataset, record: TokenizerRecord, side: Side, vocab_size: int
) -> tuple[int, str] | None:
    """Return a token for which a model has no row, and its place.

    Documents are read only if texts can spell such a token.
    """
    definition = load_dataset_tokenizer(dataset, side).file.definition
    if definition and record.special_strings == "plain":
        named = {token for token in token_names(definition) if token >= vocab_size}
        if named <= {*control_tokens(definition).values()}:
            return None
    for number in range(len(dataset.manifest.shards)):
        for _, sample in dataset.samples(number, dataset.read_index(number, with_names=True)):
            document = decode_document(sample)
            largest = int(getattr(document, side).input_ids.max(initial=-1))
            if largest >= vocab_size:
                name = json.dumps(document.document_id)
                return largest, f"in document {name} of {dataset.location}"
    return None


def tokenize_alike(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether tokenizers are equal, apart from tokens around a text."""
    if first.sha256 == second.sha256:
        return True
    if {first.file.kind, second.file.kind} != {"huggingface"}:
        return False
    return _text_part(first.file_bytes) == _text_part(second.file_bytes)


def _text_part(data: bytes) -> Mapping[str, Any]:
    definition: dict[str, Any] = json.loads(data)
    return {name: part for name, part in definition.items() if name not in _AROUND_TEXT}


def _require_gguf_tokens(path: Path, tokenizer: Tokenizer, whose: str) -> None:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.tokens")
    own = [] if field is None else [str(token) for token in field.contents()]
    file = tokenizer.file
    if file.kind == "huggingface":
        names, tolerated = token_names(file.definition), 0.0
    else:  # converters of SentencePiece models rename control tokens
        pieces = read_sentencepiece_model(file.data).pieces
        names, tolerated = {i: piece.text for i, piece in enumerate(pieces)}, 0.1
    others = [i for i, text in names.items() if i >= len(own) or own[i] != text]
    if len(others) > tolerated * len(names):
        token_id = others[0]
        found = own[token_id] if token_id < len(own) else None
        raise ForeignTokenizerError(
            f"token {token_id} is {names[token_id]!r} in the dataset's {whose} and {found!r} in "
            f"{path}: name the model that the tokenizer belongs to, or run vocag align again with "
            "the model's"
        )
