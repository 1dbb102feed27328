"""Text to `input_ids` and exact `byte_offsets`, with any fast tokenizer.

`fastokens` gives only ids, but 5 to 100 times faster than the reference libraries. If a tokenizer
spells its text they are enough: each has known bytes, and offsets are a running sum. The fast path
must be exact:

- At load, both must agree on `PROBES`, and split every character off its neighbours alike.
- In every document tokens' lengths must add up, and unless it is ASCII their bytes must spell it or
  its normal form; else it takes the reference path.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import (
    Ranges,
    TokenBatch,
    find_unusable,
    join_batches,
    splice_documents,
    without_failures,
)
from pipeline.tokenization.backends import FastEncoder, LibraryError, load_reference
from pipeline.tokenization.definition import any_of
from pipeline.tokenization.hard_texts import probes_of, require_usable
from pipeline.tokenization.pieces import LONG_TEXT_BYTES, group_texts, tokenize_in_pieces
from pipeline.tokenization.pretokenizer_splits import why_unlike
from pipeline.tokenization.reference import ReferencePath
from pipeline.tokenization.sources import TokenizerError, TokenizerFile, find_tokenizer
from schemas.document import tiles_text
from schemas.manifest import ConventionRecord, default_convention

SpecialStrings = Literal["plain", "honoured"]

_NUM_CANDIDATES = 12

logger = logging.getLogger(__name__)


class Tokenizer:
    """One model's tokenizer, giving ids and exact byte offsets.

    Attributes:
        file: the loaded file.
        source: the user's name for it.
        file_name: its name in a dataset.
        file_bytes: its content.
        sha256: its fingerprint, 64 hex digits.
        vocab_size: the largest id + 1, added tokens included.
        special_strings: "plain" or "honoured".
        bos_token_id: begin-of-sequence id or None.
        eos_token_id: end-of-document id or None.
        adds_bos: whether the model expects BOS before a text.
        adds_eos: whether it expects EOS after one.
        slow_reason: why the fast path is not taken, or None.
        num_reference_documents: documents that took the reference path.
    """

    def __init__(
        self,
        file: TokenizerFile,
        special_strings: SpecialStrings,
        *,
        fast: bool,
        proven: bool,
    ) -> None:
        """Use `load_tokenizer`."""
        self.file = file
        self.source = file.source
        self.file_name = file.file_name
        self.file_bytes = file.data
        self.sha256 = sha256(file.data).hexdigest()
        self.special_strings = special_strings
        self._reference = load_reference(
            file, honour_special=special_strings == "honoured", proven=proven
        )
        self.vocab_size = self._reference.vocab_size
        conventions = self._reference.conventions
        self.bos_token_id = conventions.bos_token_id
        self.eos_token_id = conventions.eos_token_id
        self.adds_bos = conventions.adds_bos
        self.adds_eos = conventions.adds_eos
        self.num_reference_documents = 0
        self._reference_path = ReferencePath(self._reference)
        self._vocabulary = self._reference_path.vocabulary
        self._fast: FastEncoder | None = None
        self.slow_reason = self._load_fast(fast)
        if not proven:
            require_usable(file.source, self._reference_path)
            self.check_fast_path(probes_of(self._reference.added_strings))
            if self._fast is not None and (difference := why_unlike(self._fast.definition)):
                self._disable_fast(f"fastokens: {difference}")

    @property
    def fast(self) -> bool:
        """Whether the fast path is taken."""
        return self._fast is not None

    @property
    def template_before(self) -> tuple[int, ...]:
        """Tokens that the tokenizer's template puts before a text; rows have room for one."""
        return self._reference.conventions.template_before

    @property
    def control_names(self) -> tuple[str, ...]:
        """Names of all control tokens."""
        return self._reference.conventions.control_names

    @property
    def around_text(self) -> ConventionRecord:
        """Tokens that rows put around a text by default."""
        return default_convention(self.bos_token_id, self.eos_token_id, adds_bos=self.adds_bos)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, b"" if unknown.

        Unknown are those of control tokens, the unknown token, ids out of range, and tokens that
        don't spell their text (WordPiece).
        """
        known = self._vocabulary.entries
        return known[token_id] if 0 <= token_id < len(known) else b""

    def spell_text(
        self, input_ids: NDArray[np.integer], byte_offsets: Ranges, num_text_bytes: int
    ) -> bytes | None:
        """Return the text that tokens spell, None if they don't tile it or one's bytes are unknown.

        Callers that know the text's hash must compare it.

        Args:
            input_ids: integers [T].
            byte_offsets: [T, 2].
            num_text_bytes: the text's length.
        """
        if not tiles_text(byte_offsets, num_text_bytes):
            return None
        return self._vocabulary.spell_text(input_ids, byte_offsets)

    @property
    def named_tokens(self) -> Mapping[str, int]:
        """Ids of added and control tokens by name."""
        return self._reference.named_tokens

    @property
    def control_strings(self) -> re.Pattern[bytes] | None:
        """A pattern of control tokens' strings that are read as plain text, None without any."""
        return any_of(tuple(self._reference.control))

    def keeps_text(self, text: bytes) -> bool:
        """Whether normalising leaves a text unchanged, except for an added leading space.

        True for bytes that aren't UTF-8: they are never normalised alone.
        """
        try:
            normalized = self._reference.normalize(text.decode()).encode()
        except UnicodeDecodeError:
            return True
        return normalized in (text, b" " + text)

    def base_vocabulary(self) -> dict[str, bytes]:
        """Return the model's token strings and their bytes, without added tokens."""
        pieces = self._reference.pieces
        return {piece: self.token_bytes(token_id) for piece, token_id in pieces.items()}

    def find_token(self, name: str) -> int:
        """Find a token's id by its name.

        Args:
            name: its string in the tokenizer's file, or its id in digits.

        Raises:
            TokenizerError: no such token; the message lists some.

        Example:
            >>> load_tokenizer("qwen2_5").find_token("<|endoftext|>")  # doctest: +SKIP
            151643
        """
        if name.isascii() and name.isdigit() and int(name) < self.vocab_size:
            return int(name)
        named = self._reference.named_tokens
        token_id = named.get(name, self._reference.pieces.get(name))
        if token_id is None:
            first = ", ".join(list(named)[:_NUM_CANDIDATES]) or "none"
            raise TokenizerError(
                f'tokenizer "{self.source}" has no token "{name}" (ids are 0 … '
                f"{self.vocab_size - 1}); the first of {len(named)} added and control tokens "
                f"are {first}"
            )
        return token_id

    def token_name(self, token_id: int) -> str:
        """Return a token's string in the tokenizer's file, "" if it has none."""
        every = (*self._reference.named_tokens.items(), *self._reference.pieces.items())
        return next((name for name, found in every if found == token_id), "")

    def tokenize_batch(self, texts: Sequence[bytes]) -> TokenBatch:
        """Tokenize UTF-8 texts, each on its own, without special tokens around it.

        Documents that failed are in `failures`.

        Example:
            >>> tokens = load_tokenizer("qwen2_5").tokenize_batch([b"Hi there"])  # doctest: +SKIP
            >>> tokens.byte_offsets.tolist()  # doctest: +SKIP
            [[0, 2], [2, 8]]
        """
        failures = find_unusable(texts)
        if not failures:
            return self._tokenize_either(texts, self._tokenize_reference)
        blanked = [b"" if d in failures else text for d, text in enumerate(texts)]
        batch = self._tokenize_either(blanked, self._tokenize_reference)
        return without_failures(replace(batch, failures={**batch.failures, **failures}))

    def find_unproven(
        self, input_ids: NDArray[np.integer], byte_offsets: Ranges, text: bytes
    ) -> list[int]:
        """Find tokens whose ranges don't contain their bytes, however offsets were made."""
        return self._reference_path.find_unproven(input_ids, byte_offsets, text)

    def check_fast_path(self, texts: Sequence[bytes]) -> None:
        """Encode UTF-8 texts with both paths; one difference disables the fast one for good."""
        if self._fast is None:
            return
        unusable = find_unusable(texts)
        decodable = [text for d, text in enumerate(texts) if d not in unusable]
        counted = self.num_reference_documents
        difference = self._find_difference(self._fast, decodable)
        self.num_reference_documents = counted
        if difference is not None:
            self._disable_fast(f"fastokens: {difference}")

    def _disable_fast(self, reason: str) -> None:
        self._fast = None
        self.slow_reason = reason
        logger.warning("%s: fast path disabled: %s", self.source, reason)

    def _find_difference(self, encoder: FastEncoder, texts: Sequence[bytes]) -> str | None:
        """Compare both paths, and the encoders themselves, as documents may hide a difference."""
        fast, slow = self.tokenize_batch(texts), self._tokenize_reference(texts)
        if self._fast is None:  # it has failed on one, and logged that
            return None
        for name in ("cu_tokens", "input_ids", "byte_offsets"):
            if not np.array_equal(getattr(fast, name), getattr(slow, name)):
                return f"{name} differ from the reference's on {len(texts)} probe texts"
        input_ids, cu_tokens, unsure = encoder.encode_batch([text.decode() for text in texts])
        for d in np.flatnonzero(~unsure).tolist():
            ids = input_ids[cu_tokens[d] : cu_tokens[d + 1]]
            expected = slow.input_ids[slow.cu_tokens[d] : slow.cu_tokens[d + 1]]
            if not np.array_equal(ids, expected) and self._vocabulary.all_known(ids):
                return f"input_ids differ from the reference's on probe text {d} of {len(texts)}"
        return None

    def _tokenize_either(
        self, texts: Sequence[bytes], reference: Callable[[Sequence[bytes]], TokenBatch]
    ) -> TokenBatch:
        encoder = self._fast
        if encoder is None:
            return reference(texts)
        try:
            encoded = encoder.encode_batch([text.decode() for text in texts])
        except LibraryError as error:  # after a panic its state is unknown
            logger.warning("%s: %s", self.source, error)
            self._disable_fast("fastokens failed on a text")
            return reference(texts)
        input_ids, cu_tokens, unsure = encoded
        byte_offsets, tiles = self._reference_path.lay_out(input_ids, cu_tokens, texts)
        batch = TokenBatch(input_ids, byte_offsets, cu_tokens, tiles & ~unsure)
        left = np.array(
            [
                document
                for document in np.flatnonzero(~batch.tiles).tolist()
                if unsure[document] or not self._carry_back(batch, document, texts[document])
            ],
            np.int64,
        )
        if len(left) == 0:
            return batch
        if len(left) == len(texts):  # a long document's arrays are not kept next to its next ones
            del batch, input_ids, byte_offsets, encoded
            return reference(texts)
        return splice_documents(batch, left, reference([texts[d] for d in left]))

    def _carry_back(self, batch: TokenBatch, document: int, text: bytes) -> bool:
        """Write the offsets of fast tokens that spell a normalised text; return whether they do."""
        if len(text) > LONG_TEXT_BYTES:
            return False
        own = slice(batch.cu_tokens[document], batch.cu_tokens[document + 1])
        found = self._reference_path.carry_back(batch.input_ids[own], text)
        if found is None:
            return False
        batch.byte_offsets[own] = found
        batch.tiles[document] = tiles_text(batch.byte_offsets[own], len(text))
        return True

    def _load_fast(self, wanted: bool) -> str | None:
        if not wanted:
            return "switched off"
        if not self._reference.spells:
            return "its tokens do not spell the text (WordPiece or another lossy model)"
        try:
            self._fast = FastEncoder(self.file, self._reference)
        except LibraryError as error:
            return str(error)
        return None

    def _tokenize_reference(self, texts: Sequence[bytes]) -> TokenBatch:
        """Tokenize in groups to save memory, long texts in pieces."""
        self.num_reference_documents += len(texts)
        return join_batches([self._tokenize_group(group) for group in group_texts(texts)])

    def _tokenize_group(self, texts: Sequence[bytes]) -> TokenBatch:
        if len(texts[0]) <= LONG_TEXT_BYTES:
            return self._reference_path.tokenize(texts)
        piece = partial(self._tokenize_either, reference=self._reference_path.tokenize)
        return tokenize_in_pieces(texts[0], piece)


def load_tokenizer(
    source: str,
    *,
    special_strings: SpecialStrings = "plain",
    fast: bool = True,
    proven: bool = False,
) -> Tokenizer:
    """Load a tokenizer and prove its fast path on the hard cases.

    Args:
        source: a file, a folder or a Hugging Face repository; see `find_tokenizer`.
        special_strings: "plain" reads `<s>` in a document as text, so it can't forge a control
            token; "honoured" reads it as the token.
        fast: False never takes the fast path.
        proven: skip the checks, which the same bytes passed with the same options and libraries.

    Raises:
        TokenizerError: not found, or unable to give offsets.
    """
    if special_strings not in ("plain", "honoured"):
        raise TokenizerError(
            f'special_strings "{special_strings}" is unknown; use "plain" or "honoured"'
        )
    return Tokenizer(find_tokenizer(source), special_strings, fast=fast, proven=proven)
