"""The reference path: a library's ids, with offsets proven by content.

Offsets are running sums if tokens spell the text or its normal form. Otherwise the library's are
mended and checked: an unproven token takes its whole word, or the document fails.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges, TokenBatch, without_failures
from pipeline.tokenization.backends import Encoded, LibraryError, Reference, Report
from pipeline.tokenization.kernels import flatten_bytes, offsets_from_vocabulary
from pipeline.tokenization.normalization import Rewriting, follow_normalizer
from pipeline.tokenization.offset_proof import (
    byte_positions,
    find_unproven,
    mend_offsets,
    spelled_from,
)
from schemas.document import tiles_text

_SPELLED_AT_ONCE = 1 << 16
"""Tokens; each byte of their text takes 24 bytes of memory meanwhile."""


class VocabularyTable:
    """Each id's bytes, b"" if unknown."""

    def __init__(self, entries: Sequence[bytes], restarting: Sequence[int] = ()) -> None:
        """Flatten the entries; a space may be put after `restarting` tokens."""
        self.entries = entries
        self._flat, self._cu_flat = flatten_bytes(entries)
        self._lengths = np.diff(self._cu_flat).astype(np.int32)
        self._restarts = np.zeros(len(entries), np.bool_)
        # After one that begins with a space itself, it would be a guess which of two was put.
        if not any(entries[token_id].startswith(b" ") for token_id in restarting):
            self._restarts[[*restarting]] = True

    def lay_out(
        self,
        input_ids: NDArray[np.uint32],
        cu_tokens: NDArray[np.int64],
        texts: Sequence[bytes],
        *,
        compare: NDArray[np.bool_],
    ) -> tuple[Ranges, NDArray[np.bool_]]:
        """Lay each document's tokens side by side; see `kernels.offsets_from_vocabulary`."""
        byte_offsets = np.empty((len(input_ids), 2), np.int32)
        proven = np.zeros(len(texts), np.bool_)
        compared = [text if wanted else b"" for text, wanted in zip(texts, compare, strict=True)]
        joined, cu_joined = flatten_bytes(compared)
        offsets_from_vocabulary(
            input_ids=input_ids,
            cu_tokens=cu_tokens,
            num_text_bytes=np.fromiter(map(len, texts), np.int64, len(texts)),
            compared=joined,
            cu_compared=cu_joined,
            token_bytes=self._flat,
            cu_token_bytes=self._cu_flat,
            token_lengths=self._lengths,
            restarts=self._restarts,
            byte_offsets=byte_offsets,
            proven=proven,
        )
        return byte_offsets, proven

    def of(self, input_ids: NDArray[np.integer]) -> list[bytes]:
        """Look up each token's bytes."""
        return [self.entries[token_id] for token_id in input_ids.tolist()]

    def all_known(self, input_ids: NDArray[np.integer]) -> bool:
        """Whether all tokens' bytes are known."""
        return bool(self._lengths[input_ids].all())

    def spell_text(self, input_ids: NDArray[np.integer], byte_offsets: Ranges) -> bytes | None:
        """Return the text that tokens tile, None if one has too few bytes.

        Of too many, the last count (a dummy prefix covers none), but a final space is left out.
        """
        ids, ends = input_ids.astype(np.int64), byte_offsets[:, 1]
        widths = ends - byte_offsets[:, 0]
        if ids.max(initial=0) >= len(self.entries) or (self._lengths[ids] < widths).any():
            return None
        firsts = self._cu_flat[ids + 1] - widths
        if len(ids) and self.entries[ids[-1]].endswith(b" "):
            firsts[-1] = self._cu_flat[ids[-1]]
        shifts, text = firsts - byte_offsets[:, 0], []
        for start in range(0, len(ids), _SPELLED_AT_ONCE):
            some = slice(start, start + _SPELLED_AT_ONCE)
            first = ends[start] - widths[start]
            places = np.arange(first, first + widths[some].sum())
            text.append(self._flat[places + np.repeat(shifts[some], widths[some])].tobytes())
        return b"".join(text)


_WORD = re.compile(r"\S+")


class ReferencePath:
    """Tokenizes with the reference library.

    Attributes:
        vocabulary: each id's bytes in the text; empty if tokens don't spell it.
        contents: each id's bytes in the normalised text.
    """

    def __init__(self, reference: Reference) -> None:
        """Read the reference's vocabulary."""
        self.contents = VocabularyTable(reference.contents(), reference.restarting)
        self.vocabulary = self.contents
        if not reference.spells:
            self.vocabulary = VocabularyTable([b""] * reference.vocab_size)
        self._reference = reference

    def tokenize(self, texts: Sequence[bytes]) -> TokenBatch:
        """Tokenize valid UTF-8."""
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
            try:
                found = self._find_offsets(decoded[document], encoded[document])
            except LibraryError as error:
                found = str(error)
            if isinstance(found, str):
                failures[document] = found
            else:
                own[:] = found
                proven[document] = tiles_text(own, len(texts[document]))
        return without_failures(batch) if failures else batch

    def lay_out(
        self, input_ids: NDArray[np.uint32], cu_tokens: NDArray[np.int64], texts: Sequence[bytes]
    ) -> tuple[Ranges, NDArray[np.bool_]]:
        """Return running sums as offsets, and which texts' are proven."""
        keeps_ascii = self._reference.keeps_ascii
        compare = np.array([not (keeps_ascii and text.isascii()) for text in texts], np.bool_)
        return self.vocabulary.lay_out(input_ids, cu_tokens, texts, compare=compare)

    def carry_back(self, input_ids: NDArray[np.uint32], text: bytes) -> NDArray[np.int64] | None:
        """Return offsets of tokens that spell a text's normal form, white space included."""
        contents = self.contents.of(input_ids)
        if self._reference.lost_bytes or not all(contents):
            return None
        rewriting = follow_normalizer(text.decode(), self._reference.normalize)
        spelled = b"".join(contents)
        if rewriting and spelled in (rewriting.normalized, b" " + rewriting.normalized):
            return self._carry_back(contents, rewriting)
        return None

    def find_unproven(
        self, input_ids: NDArray[np.integer], byte_offsets: Ranges, text: bytes
    ) -> list[int]:
        """Find the tokens whose ranges don't contain their bytes."""
        contents = self._read_names(input_ids, byte_offsets, text)
        spelled = b"".join(contents)
        if spelled in (text, b" " + text):  # a space put first covers no byte
            bounds = np.cumsum([0, *map(len, contents)]) + len(text) - len(spelled)
            bounds = np.maximum(bounds, 0)
            if np.array_equal(byte_offsets, np.stack([bounds[:-1], bounds[1:]], axis=1)):
                return []
        return find_unproven(
            byte_offsets,
            contents,
            text,
            self._reference.normalize,
            lost_bytes=self._reference.lost_bytes,
            keeps_spaces=self._reference.spells,
        )

    def _encode(
        self, texts: Sequence[str], failures: dict[int, str], first: int = 0
    ) -> list[Encoded]:
        """Encode texts; a failed one has no ids, and a reason in `failures`."""
        try:
            return self._reference.encode_batch(texts)
        except LibraryError as error:  # it doesn't say on which, and gives nothing for the others
            if len(texts) > 1:
                each = enumerate(texts)
                return [self._encode([text], failures, place)[0] for place, text in each]
            failures[first] = str(error)
            ids = np.empty(0, np.uint32)
            return [Encoded(ids, lambda: Report(ids, np.empty((0, 2), np.int64), []))]

    def _find_offsets(self, text: str, encoded: Encoded) -> NDArray[np.int64] | str:
        rewriting = follow_normalizer(text, self._reference.normalize)
        contents = self._spell_names(encoded.ids, self.contents.of(encoded.ids), rewriting)
        found: NDArray[np.int64] | str | None = self._carry_back(contents, rewriting)
        if found is not None:
            return found
        report = encoded.report()
        if not np.array_equal(report.ids, encoded.ids):
            return "the reference tokenizer gave different ids for the same text the second time"
        contents = self.contents.of(encoded.ids)
        contents = [of or says for of, says in zip(contents, report.surfaces, strict=True)]
        contents = self._spell_names(encoded.ids, contents, rewriting)
        found = self._carry_back(contents, rewriting)
        if found is None:
            found = self._mend(text, report, contents, rewriting)
        if isinstance(found, str):  # white space was left out, or a space put first
            walked = self._carry_back(contents, rewriting, walk=True)
            if walked is not None and not self.find_unproven(report.ids, walked, text.encode()):
                return walked
        return found

    def _spell_names(
        self, ids: NDArray[np.uint32], contents: list[bytes], rewriting: Rewriting | None
    ) -> list[bytes]:
        """Replace bytes by names that the text spells: `<0x0A>`, not a line break."""
        names = self._reference.byte_names
        if not names or rewriting is None or b"<0x" not in rewriting.normalized:
            return contents
        text = rewriting.normalized
        at, spelled = 0 if text.startswith(b" ") else -len(b" "), list(contents)
        if not contents or not contents[0].startswith(b" "):
            at = 0
        for place, (token_id, content) in enumerate(zip(ids.tolist(), contents, strict=True)):
            if not content:
                break
            name = names.get(token_id)
            if name and text.startswith(name, max(at, 0)):
                spelled[place] = content = name
            at += len(content)
        return spelled

    def _read_names(
        self, ids: NDArray[np.integer], byte_offsets: Ranges, text: bytes
    ) -> list[bytes]:
        contents, names = self.contents.of(ids), self._reference.byte_names
        if names:
            for place in np.flatnonzero(np.isin(ids, list(names))).tolist():
                name, own = names[int(ids[place])], text[slice(*byte_offsets[place].tolist())]
                if self._reads(own, name):
                    contents[place] = name
        return contents

    def _reads(self, text: bytes, name: bytes) -> bool:
        try:
            return len(text) >= len(name) and self._reference.normalize(
                text.decode()
            ).encode().endswith(name)
        except UnicodeDecodeError:
            return False

    def _carry_back(
        self, contents: Sequence[bytes], rewriting: Rewriting | None, *, walk: bool = False
    ) -> NDArray[np.int64] | None:
        if rewriting is None or not all(contents):
            return None
        lost, normalized = self._reference.lost_bytes, rewriting.normalized
        kept = normalized.translate(None, lost)
        shift = spelled_from(b"".join(contents), kept)
        if shift is None:
            places = _walk(contents, kept) if walk or not self._reference.spells else None
        else:
            bounds = np.cumsum([0, *map(len, contents)], dtype=np.int64) + shift
            bounds = np.clip(bounds, 0, len(kept))  # without a space that isn't the text's
            places = np.stack([bounds[:-1], bounds[1:]], axis=1)
        if places is None or len(kept) == len(normalized):
            return None if places is None else rewriting.to_text(places)
        positions = np.flatnonzero(~np.isin(np.frombuffer(normalized, np.uint8), list(lost)))
        starts = np.append(positions, len(normalized))[places[:, 0]]
        starts[places[:, 1] == 0] = 0  # a space put before the text, whatever that begins with
        ends = np.append(positions, len(normalized))[places[:, 1] - 1] + 1
        ends = np.where(places[:, 1] > places[:, 0], ends, starts)
        return rewriting.to_text(np.stack([starts, ends], axis=1))

    def _mend(
        self, text: str, report: Report, contents: Sequence[bytes], rewriting: Rewriting | None
    ) -> NDArray[np.int64] | str:
        ids, reported = report.ids, _monotone(report.ranges)
        data = text.encode()
        mended = mend_offsets(reported, data, contents)
        if rewriting is not None:
            mended = rewriting.widen(mended)
        unproven = self.find_unproven(ids, mended, data)
        if unproven:
            mended[unproven] = words_around(mended[unproven], text)
            mended = _monotone(mended)
            unproven = self.find_unproven(ids, mended, data)
        if unproven:
            start, end = mended[unproven[0]].tolist()
            return (
                f"{len(unproven)} tokens stand for different text from what their offsets cover, "
                f"the first is token {unproven[0]} at bytes {start}:{end}"
            )
        return mended


def _monotone(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Widen ranges until none decreases.

    tokenizers (0.23) finds added tokens in white space that another swallows (`rstrip`).
    """
    starts = np.minimum.accumulate(ranges[::-1, 0])[::-1]
    return np.stack([starts, np.maximum.accumulate(ranges.max(axis=1))], axis=1)


def _walk(contents: Sequence[bytes], text: bytes) -> NDArray[np.int64] | None:
    """Place tokens in a text that they spell except for white space."""
    places: list[tuple[int, int]] = []
    position = 0
    for content in contents:
        while not text.startswith(content, position):
            if content.startswith(b" "):  # one that the tokenizer put in
                content = content[1:]
            elif text[position : position + 1].isspace():  # one that it left out
                position += 1
            else:
                return None
        places.append((position, position + len(content)))
        position += len(content)
    left = text[position:]
    return None if left.strip() else np.array(places, np.int64).reshape(-1, 2)


def words_around(ranges: NDArray[np.int64], text: str) -> NDArray[np.int64]:
    """Widen byte ranges over words that they touch, else over the next word."""
    positions = byte_positions(text)
    words = np.array([match.span() for match in _WORD.finditer(text)], np.int64).reshape(-1, 2)
    words = positions[words]
    if len(words) == 0:
        return ranges
    first = np.minimum(np.searchsorted(words[:, 1], ranges[:, 0], side="right"), len(words) - 1)
    last = np.maximum(np.searchsorted(words[:, 0], ranges[:, 1], side="left") - 1, first)
    starts = np.minimum(ranges[:, 0], words[first, 0])
    return np.stack([starts, np.maximum(ranges[:, 1], words[last, 1])], axis=1)
