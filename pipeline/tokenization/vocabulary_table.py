"""What each id stands for, laid out for the kernels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges
from pipeline.tokenization.kernels import flatten_bytes, offsets_from_vocabulary


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

        None if they don't.
        """
        places: list[tuple[int, int]] = []
        position = 0
        for token_id in input_ids.tolist():
            content = self.entries[token_id]
            if not content:
                return None
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

    def spell(self, input_ids: NDArray[np.integer]) -> bytes:
        """Return what tokens stand for, one after another."""
        return b"".join([self.entries[token_id] for token_id in input_ids.tolist()])

    def spell_text(self, input_ids: NDArray[np.integer], byte_offsets: Ranges) -> bytes | None:
        """Return the text that tokens tile, None if one stands for too few bytes.

        Where a token covers fewer bytes than it stands for, the last ones are the text's: a dummy
        prefix is in the vocabulary and not in the text.
        """
        ids, ends = input_ids.astype(np.int64), byte_offsets[:, 1]
        widths = ends - byte_offsets[:, 0]
        if ids.max(initial=0) >= len(self.entries) or (self._lengths[ids] < widths).any():
            return None
        places = np.arange(widths.sum()) + np.repeat(self._cu_flat[ids + 1] - ends, widths)
        text: NDArray[np.uint8] = self._flat[places]
        return text.tobytes()
