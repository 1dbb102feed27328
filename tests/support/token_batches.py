"""What tests read of batches of tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges, TokenBatch


def by_document(batch: TokenBatch) -> Iterator[tuple[NDArray[Any], Ranges]]:
    """Yield each document's ids and byte offsets."""
    ends = batch.cu_tokens[1:-1]
    yield from zip(np.split(batch.input_ids, ends), np.split(batch.byte_offsets, ends), strict=True)


def require_equal(found: TokenBatch, expected: TokenBatch) -> None:
    for name in ("cu_tokens", "input_ids", "byte_offsets", "tiles"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    assert found.failures == expected.failures
