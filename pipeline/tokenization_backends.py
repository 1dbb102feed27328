"""The tokenizer libraries behind `pipeline.tokenization`, each behind the same few calls.

`tokenizers` and `sentencepiece` are the references; `gigatoken` is the fast path.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gigatoken
import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray

from pipeline.offsets import byte_positions
from pipeline.tokenization_sources import TokenizerError, TokenizerFile

CONTROL_MARKUP = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
BOS_NAMES = ("<s>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "[CLS]")
EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[SEP]")
SPACE_PIECE = "▁"


class Reference(Protocol):
    """What every reference tokenizer gives."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    adds_bos: bool
    adds_eos: bool

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids, without added special tokens."""

    def encode_offsets(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return ids [T] and byte ranges [T, 2] as the library reports them."""

    def vocabulary(self) -> list[bytes] | None:
        """Return the bytes that each id stands for, b"" where it stands for none or unknown.

        None where tokens don't spell the text (WordPiece drops white space, for one).
        """

    def pieces(self) -> dict[str, int]:
        """Return the model's token strings and their ids, added tokens left out."""

    def normalize(self, text: str) -> str:
        """Return the text as the model sees it before it is split."""


class HuggingFaceReference:
    """A `tokenizer.json`, read by `tokenizers`."""

    def __init__(self, file: TokenizerFile, *, honour_special: bool) -> None:
        """Load the tokenizer, less its post-processor, truncation and padding.

        Those three add tokens or change offsets (`trim_offsets`), and no text needs them here.
        """
        original = json.loads(file.data)
        self.definition = original | {"post_processor": None, "truncation": None, "padding": None}
        self.control = {} if honour_special else _control_tokens(original)
        self.definition["added_tokens"] = [
            token for token in original["added_tokens"] if token["content"] not in self.control
        ]
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self.definition))
        except Exception as error:  # the Rust library raises plain Exception
            raise TokenizerError(f'tokenizer "{file.source}" does not load: {error}') from error
        added = {token["content"]: token["id"] for token in original["added_tokens"]}
        self.vocab_size = 1 + max(*self.pieces().values(), *added.values(), -1)
        self._read_conventions(original, added, file)

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids."""
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_offsets(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return ids and reported ranges, converted from characters to bytes."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        characters = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.uint32), byte_positions(text)[characters]

    def vocabulary(self) -> list[bytes] | None:
        """Return the bytes of each id, see `Reference`."""
        model = self.definition["model"]
        spell = _speller(self.definition)
        if spell is None:
            return None
        pieces = self.pieces()
        table = [b""] * self.vocab_size
        for piece, token_id in pieces.items():
            table[token_id] = spell(piece)
        if model.get("unk_token") in pieces:
            table[pieces[model["unk_token"]]] = b""
        for token in self.definition["added_tokens"]:
            table[token["id"]] = token["content"].encode()
        for token_id in self.control.values():
            table[token_id] = b""
        return table

    def normalize(self, text: str) -> str:
        """Return the normalised text."""
        normalizer = self.tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def pieces(self) -> dict[str, int]:
        """Return the model's token strings and their ids, added tokens left out."""
        vocab = self.definition["model"]["vocab"]
        if isinstance(vocab, dict):
            return vocab
        return {piece: place for place, (piece, _) in enumerate(vocab)}

    def _read_conventions(
        self, original: dict[str, Any], added: dict[str, int], file: TokenizerFile
    ) -> None:
        """Read which tokens the model expects around a text: config first, then post-processor."""
        special = {t["content"]: t["id"] for t in original["added_tokens"] if t["special"]}
        template = _find_processor(original.get("post_processor"), "TemplateProcessing")
        before, after = _template_tokens(template, self.pieces() | added)
        config = file.config
        self.bos_token_id = _named_token(config.get("bos_token"), BOS_NAMES, special)
        self.eos_token_id = _named_token(config.get("eos_token"), EOS_NAMES, special)
        if before:
            self.bos_token_id = before[0]
        expected = bool(before) if template else self.bos_token_id is not None
        self.adds_bos = bool(config.get("add_bos_token", expected))
        self.adds_eos = bool(config.get("add_eos_token", bool(after)))


class SentencePieceReference:
    """A SentencePiece model (BPE or Unigram), read by `sentencepiece`, which counts bytes."""

    def __init__(self, file: TokenizerFile, *, honour_special: bool) -> None:
        """Load the model.

        Raises:
            TokenizerError: no SentencePiece model, or special strings should be honoured, which
                SentencePiece never does.
        """
        if honour_special:
            raise TokenizerError(
                f'tokenizer "{file.source}": a SentencePiece model never reads special strings in '
                "a text as control tokens; use its tokenizer.json or leave special strings plain"
            )
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(file.data)
        except RuntimeError as error:
            raise TokenizerError(
                f'tokenizer "{file.source}" is no SentencePiece model: {error}'
            ) from error
        self.vocab_size = int(self.processor.vocab_size())
        self.bos_token_id = _non_negative(self.processor.bos_id())
        self.eos_token_id = _non_negative(self.processor.eos_id())
        self.adds_bos = bool(file.config.get("add_bos_token", self.bos_token_id is not None))
        self.adds_eos = bool(file.config.get("add_eos_token", False))

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids."""
        result: list[list[int]] = self.processor.Encode(list(texts), return_type=int, num_threads=1)
        return result

    def encode_offsets(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return ids and reported byte ranges."""
        pieces = self.processor.Encode(text, return_type="proto").pieces
        ranges = np.array([(piece.begin, piece.end) for piece in pieces], np.int64).reshape(-1, 2)
        return np.array([piece.id for piece in pieces], np.uint32), ranges

    def vocabulary(self) -> list[bytes] | None:
        """Return the bytes of each id, see `Reference`."""
        table = []
        for token_id in range(self.vocab_size):
            piece = self.processor.id_to_piece(token_id)
            if self.processor.is_byte(token_id):
                table.append(bytes([int(piece[1:-1], 16)]))
            elif self.processor.is_control(token_id) or self.processor.is_unknown(token_id):
                table.append(b"")
            else:
                table.append(piece.replace(SPACE_PIECE, " ").encode())
        return table

    def pieces(self) -> dict[str, int]:
        """Return the model's token strings and their ids."""
        return {self.processor.id_to_piece(place): place for place in range(self.vocab_size)}

    def normalize(self, text: str) -> str:
        """Return the normalised text."""
        return str(self.processor.Normalize(text))


class FastEncoder:
    """`gigatoken`, which encodes batches of documents 8 to 100 times faster but gives no offsets."""

    def __init__(self, file: TokenizerFile, reference: Reference) -> None:
        """Load the tokenizer; any exception means that gigatoken does not support it."""
        if isinstance(reference, HuggingFaceReference):
            self.tokenizer = gigatoken.Tokenizer.from_json(json.dumps(reference.definition))
        else:
            self.tokenizer = gigatoken.Tokenizer.from_sentencepiece(file.data)

    def encode_batch(
        self, texts: Sequence[bytes]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return all documents' ids [N], and where each document's start, [D + 1].

        One thread: parallelism comes from workers, which would fight over threads otherwise.
        """
        layout: Any = self.tokenizer.encode_batch(list(texts), parallel=False).layout
        return layout.content.data, layout.offsets.data


def load_reference(file: TokenizerFile, *, honour_special: bool) -> Reference:
    """Return the reference tokenizer for a file."""
    if file.kind == "huggingface":
        return HuggingFaceReference(file, honour_special=honour_special)
    return SentencePieceReference(file, honour_special=honour_special)


def _control_tokens(definition: dict[str, Any]) -> dict[str, int]:
    """Return the added tokens that a document must not be able to forge.

    Those marked special, and those in control markup such as Qwen's `<|fim_prefix|>`, which its
    own file does not mark. Other added tokens are ordinary vocabulary.
    """
    return {
        token["content"]: token["id"]
        for token in definition["added_tokens"]
        if token["special"] or CONTROL_MARKUP.fullmatch(token["content"])
    }


def _speller(definition: dict[str, Any]) -> Callable[[str], bytes] | None:
    """Return what turns a vocabulary piece into the bytes it stands for, None where nothing does."""
    model = definition["model"]
    kind = model.get("type", "BPE")
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if kind not in ("BPE", "Unigram") or affixes:
        return None
    parts = json.dumps(
        [definition.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")],
        ensure_ascii=False,
    )
    if '"ByteLevel"' in parts:
        return _spell_byte_level
    if '"Metaspace"' in parts or SPACE_PIECE in parts:
        fallback = bool(model.get("byte_fallback"))
        return lambda piece: _spell_sentencepiece(piece, byte_fallback=fallback)
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to the bytes they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def _spell_byte_level(piece: str) -> bytes:
    try:
        return bytes([BYTE_LEVEL_ALPHABET[character] for character in piece])
    except KeyError:
        return b""


def _spell_sentencepiece(piece: str, *, byte_fallback: bool) -> bytes:
    if byte_fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE_PIECE, " ").encode()


def _find_processor(processor: dict[str, Any] | None, kind: str) -> dict[str, Any] | None:
    for part in (processor or {}).get("processors", [processor]):
        if part and part["type"] == kind:
            return dict(part)
    return None


def _template_tokens(
    template: dict[str, Any] | None, ids: dict[str, int]
) -> tuple[list[int], list[int]]:
    """Return the special tokens that a template puts before and after a single text."""
    before: list[int] = []
    after: list[int] = []
    side = before
    for part in (template or {}).get("single", []):
        if "Sequence" in part:
            side = after
        else:
            side.append(ids[part["SpecialToken"]["id"]])
    return before, after


def _named_token(named: Any, candidates: Sequence[str], ids: dict[str, int]) -> int | None:
    if isinstance(named, dict):
        named = named.get("content")
    for name in (named, *candidates):
        if isinstance(name, str) and name in ids:
            return ids[name]
    return None


def _non_negative(token_id: int) -> int | None:
    return int(token_id) if token_id >= 0 else None
