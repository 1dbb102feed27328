"""The reference path: a library's ids, and offsets that are proven by content.

Where tokens spell a text, offsets are a running sum. Where a normaliser rewrote it, they spell what
it became (`pipeline.tokenization.normalization`), and are carried back over each piece that
changed. Only if a token stands for unknown bytes is the library's report used, mended and
then held against the text: a token that its bytes do not hold takes its whole word, or the document
fails.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges, TokenBatch, without_failures
from pipeline.tokenization.backends import Encoded, LibraryError, Reference
from pipeline.tokenization.normalization import Rewriting, follow_normalizer
from pipeline.tokenization.offset_proof import byte_positions, find_unproven, mend_offsets
from pipeline.tokenization.vocabulary_table import VocabularyTable
from schemas.document import tiles_text

_WORD = re.compile(r"\S+")


class ReferencePath:
    """Tokenizes with the reference library.

    Attributes:
        vocabulary: what each id stands for in the text; without entries where tokens spell none.
        contents: what each id stands for in the normalised text.
    """

    def __init__(self, reference: Reference) -> None:
        """Read the reference's vocabulary."""
        self.contents = VocabularyTable(reference.contents())
        self.vocabulary = self.contents
        if not reference.spells:
            self.vocabulary = VocabularyTable([b""] * reference.vocab_size)
        self._reference = reference

    def tokenize(self, texts: Sequence[bytes]) -> TokenBatch:
        """Tokenize texts that are known to be UTF-8."""
        decoded = [text.decode() for text in texts]
        failures: dict[int, str] = {}
        encoded = self._encode(decoded, failures)
        cu_tokens = np.cumsum([0, *(len(one.ids) for one in encoded)], dtype=np.int64)
        input_ids = np.concatenate([np.empty(0, np.uint32), *(one.ids for one in encoded)])
        byte_offsets, proven = self.lay_out(input_ids, cu_tokens, texts)
        batch = TokenBatch(input_ids, byte_offsets, cu_tokens, proven, failures)
        for document in np.flatnonzero(~proven).tolist():
            if document in failures:
                continue
            own = byte_offsets[cu_tokens[document] : cu_tokens[document + 1]]
            found = self._find_offsets(decoded[document], encoded[document])
            if isinstance(found, str):
                failures[document] = found
            else:
                own[:] = found
                proven[document] = tiles_text(own, len(texts[document]))
        return without_failures(batch) if failures else batch

    def lay_out(
        self, input_ids: NDArray[np.uint32], cu_tokens: NDArray[np.int64], texts: Sequence[bytes]
    ) -> tuple[Ranges, NDArray[np.bool_]]:
        """Return offsets as running sums, and for which texts they are proven."""
        keeps_ascii = self._reference.keeps_ascii
        compare = np.array([not (keeps_ascii and text.isascii()) for text in texts], np.bool_)
        return self.vocabulary.lay_out(input_ids, cu_tokens, texts, compare=compare)

    def carry_back(self, input_ids: NDArray[np.uint32], text: bytes) -> NDArray[np.int64] | None:
        """Return the offsets of tokens that spell what a text becomes when normalised, [T, 2].

        None if they don't spell it to the last byte, but for a space put before it: an encoder
        that isn't the reference may not leave out white space either.
        """
        if self._reference.lost_bytes or not self.contents.all_known(input_ids):
            return None
        rewriting = follow_normalizer(text.decode(), self._reference.normalize)
        if rewriting is None:
            return None
        whole = rewriting.normalized
        if self.contents.spell(input_ids) not in (whole, b" " + whole):
            return None
        places = self._find_places(input_ids, whole)
        return None if places is None else rewriting.to_text(places)

    def find_unproven(
        self, input_ids: NDArray[np.integer], byte_offsets: Ranges, text: bytes
    ) -> list[int]:
        """Return the tokens of a text whose bytes do not hold what the tokens stand for."""
        if self._tile(input_ids, byte_offsets, text):
            return []
        return find_unproven(
            byte_offsets,
            [self.contents.entries[token_id] for token_id in input_ids.tolist()],
            text,
            self._reference.normalize,
            lost_bytes=self._reference.lost_bytes,
            keeps_spaces=self._reference.spells,
        )

    def _tile(self, input_ids: NDArray[np.integer], byte_offsets: Ranges, text: bytes) -> bool:
        """Return whether tokens spell the text, side by side."""
        ends = np.cumsum(self.contents.lengths(input_ids))
        return (
            self.contents.spell(input_ids) == text
            and np.array_equal(byte_offsets[:, 1], ends)
            and np.array_equal(byte_offsets[1:, 0], ends[:-1])
            and not byte_offsets[:1, 0].any()
        )

    def _encode(
        self, texts: Sequence[str], failures: dict[int, str], first: int = 0
    ) -> list[Encoded]:
        """Encode texts; one on which the library fails has no ids, and its reason in `failures`."""
        try:
            return self._reference.encode_batch(texts)
        except LibraryError as error:  # it doesn't say on which, and gives nothing for the others
            if len(texts) > 1:
                each = enumerate(texts)
                return [self._encode([text], failures, place)[0] for place, text in each]
            failures[first] = str(error)
            ids = np.empty(0, np.uint32)
            return [Encoded(ids, lambda: (ids, np.empty((0, 2), np.int64)))]

    def _find_offsets(self, text: str, encoded: Encoded) -> NDArray[np.int64] | str:
        """Return exact offsets of a text's tokens, or what is wrong."""
        try:
            return self._prove_offsets(text, encoded)
        except LibraryError as error:
            return str(error)

    def _prove_offsets(self, text: str, encoded: Encoded) -> NDArray[np.int64] | str:
        rewriting = follow_normalizer(text, self._reference.normalize)
        if rewriting is not None and self.contents.all_known(encoded.ids):
            places = self._find_places(encoded.ids, rewriting.normalized)
            if places is not None:
                return rewriting.to_text(places)
        return self._mend(text, encoded, rewriting)

    def _find_places(self, ids: NDArray[np.uint32], normalized: bytes) -> NDArray[np.int64] | None:
        """Return where tokens lie in the normalised text, [T, 2]; None: they don't spell it."""
        lost = self._reference.lost_bytes
        kept = normalized.translate(None, lost)
        shift = _spelled_from(self.contents.spell(ids), kept)
        if shift is None:
            places = None if self._reference.spells else self.contents.walk(ids, kept)
        else:
            ends = np.cumsum(self.contents.lengths(ids), dtype=np.int64) + shift
            starts = ends - self.contents.lengths(ids)
            places = np.stack([np.maximum(starts, 0), np.maximum(ends, 0)], axis=1)
        if places is None or len(kept) == len(normalized):
            return places
        positions = np.flatnonzero(~np.isin(np.frombuffer(normalized, np.uint8), list(lost)))
        starts = np.append(positions, len(normalized))[places[:, 0]]
        ends = np.append(positions, len(normalized))[places[:, 1] - 1] + 1
        return np.stack([starts, np.where(places[:, 1] > places[:, 0], ends, starts)], axis=1)

    def _mend(
        self, text: str, encoded: Encoded, rewriting: Rewriting | None
    ) -> NDArray[np.int64] | str:
        """Return the library's own offsets, mended and proven, or what is wrong."""
        ids, reported = encoded.report()
        if not np.array_equal(ids, encoded.ids):
            return "the reference tokenizer gave other ids for the same text the second time"
        if np.any(reported[1:] < reported[:-1]) or np.any(reported[:, 1] < reported[:, 0]):
            return "the tokenizer's offsets are not monotone"
        data = text.encode()
        mended = mend_offsets(
            reported,
            data,
            [self.contents.entries[token_id] for token_id in ids.tolist()],
        )
        if rewriting is not None:
            mended = rewriting.widen(mended)
        unproven = self.find_unproven(ids, mended, data)
        if unproven:
            mended[unproven] = _words_around(mended[unproven], text)
            mended[:, 0] = np.minimum.accumulate(mended[::-1, 0])[::-1]
            mended[:, 1] = np.maximum.accumulate(mended[:, 1])
            unproven = self.find_unproven(ids, mended, data)
        if unproven:
            start, end = mended[unproven[0]].tolist()
            return (
                f"{len(unproven)} tokens stand for different text from what their offsets cover, "
                f"the first is token {unproven[0]} at bytes {start}:{end}"
            )
        return mended


def _spelled_from(spelled: bytes, text: bytes) -> int | None:
    """Return where in a text its tokens begin, None if they don't spell it.

    -1 if a space comes first; more than 0 where white space is left out at the text's start.
    """
    if spelled in (text, b" " + text):
        return len(text) - len(spelled)
    core = spelled.strip()
    if core != text.strip():
        return None
    head, tail = _ends(spelled)
    text_head, text_tail = _ends(text)
    if not core or not text_tail.startswith(tail):
        return None
    fits = head == b" " + text_head or text_head.endswith(head)
    return len(text_head) - len(head) if fits else None


def _ends(text: bytes) -> tuple[bytes, bytes]:
    """Return the white space at both ends of a text."""
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]


def _words_around(ranges: NDArray[np.int64], text: str) -> NDArray[np.int64]:
    """Return the ranges, int64 [T, 2], widened over the words that they touch."""
    positions = byte_positions(text)
    words = np.array([match.span() for match in _WORD.finditer(text)], np.int64).reshape(-1, 2)
    words = positions[words]
    if len(words) == 0:
        return ranges
    first = np.minimum(np.searchsorted(words[:, 1], ranges[:, 0], side="right"), len(words) - 1)
    last = np.maximum(np.searchsorted(words[:, 0], ranges[:, 1], side="left") - 1, 0)
    starts = np.minimum(ranges[:, 0], words[first, 0])
    return np.stack([starts, np.maximum(ranges[:, 1], words[last, 1])], axis=1)
