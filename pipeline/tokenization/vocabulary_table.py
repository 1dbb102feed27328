"""What each id stands for, laid out for the kernels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges
from pipeline.tokenization.kernels import (
    flatten_bytes,
    offsets_from_vocabulary,
    spell_tokens,
    walk_contents,
)


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
        offsets_from_vocabulary(
            input_ids,
            cu_tokens,
            np.fromiter(map(len, texts), np.int64, len(texts)),
            *flatten_bytes(compared),
            self._flat,
            self._cu_flat,
            self._lengths,
            byte_offsets,
            proven,
        )
        return byte_offsets, proven

    def lengths(self, input_ids: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return how many bytes tokens stand for, int32 [T]."""
        lengths: NDArray[np.int32] = self._lengths[input_ids]
        return lengths

    def all_known(self, input_ids: NDArray[np.integer]) -> bool:
        """Return whether each token stands for known bytes."""
        return bool(self._lengths[input_ids].all())

    def walk(self, input_ids: NDArray[np.integer], text: bytes) -> NDArray[np.int64] | None:
        """Return where tokens lie in a text that they spell but for white space, int64 [T, 2].

        None where they don't.
        """
        places = np.empty((len(input_ids), 2), np.int64)
        data = np.frombuffer(text, np.uint8)
        ids = input_ids.astype(np.uint32)
        found = walk_contents(ids, data, self._flat, self._cu_flat, places)
        return places if found else None

    def spell(self, input_ids: NDArray[np.integer]) -> bytes:
        """Return what tokens stand for, one after another."""
        return b"".join([self.entries[token_id] for token_id in input_ids.tolist()])

    def spell_text(
        self, input_ids: NDArray[np.integer], byte_offsets: Ranges, num_text_bytes: int
    ) -> bytes | None:
        """Return the text that tokens tile, None where one stands for too few bytes.

        See `pipeline.tokenization.kernels.spell_tokens`.
        """
        text = np.empty(num_text_bytes, np.uint8)
        known = spell_tokens(input_ids, byte_offsets, self._flat, self._cu_flat, text)
        return text.tobytes() if known else None
