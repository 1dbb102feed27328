"""What each id stands for, laid out for the kernels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges
from pipeline.tokenization.kernels import flatten_bytes, offsets_from_vocabulary

_SPELLED_AT_ONCE = 1 << 16
"""Tokens; each byte of their text takes 24 bytes of memory meanwhile."""


class VocabularyTable:
    """The bytes that each id stands for, and where tokens lie that spell their text.

    Attributes:
        entries: bytes by id; b"" stands for none, or for none that is known.
    """

    def __init__(self, entries: Sequence[bytes]) -> None:
        """Lay the entries out."""
        self.entries = entries
        self._flat, self._cu_flat = flatten_bytes(entries)
        self._lengths = np.diff(self._cu_flat).astype(np.int32)

    def lay_out(
        self,
        input_ids: NDArray[np.uint32],
        cu_tokens: NDArray[np.int64],
        texts: Sequence[bytes],
        *,
        compare: NDArray[np.bool_],
    ) -> tuple[Ranges, NDArray[np.bool_]]:
        """Lay each document's tokens side by side.

        See `pipeline.tokenization.kernels.offsets_from_vocabulary`.

        Returns:
            byte_offsets, int32 [N, 2], and bool [D], whether they are proven.
        """
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
            byte_offsets=byte_offsets,
            proven=proven,
        )
        return byte_offsets, proven

    def of(self, input_ids: NDArray[np.integer]) -> list[bytes]:
        """Return what each token stands for."""
        return [self.entries[token_id] for token_id in input_ids.tolist()]

    def all_known(self, input_ids: NDArray[np.integer]) -> bool:
        """Return whether each token stands for known bytes."""
        return bool(self._lengths[input_ids].all())

    def spell_text(self, input_ids: NDArray[np.integer], byte_offsets: Ranges) -> bytes | None:
        """Return the text that tokens tile, None if one stands for too few bytes.

        Where a token covers fewer bytes than it stands for, the last ones are the text's: a dummy
        prefix is in the vocabulary and not in the text. A space that may come last instead is left
        out of the last token.
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
