"""Monotone offsets for hypothesis: with gaps, overlaps and tokens that cover no byte, or tiling.

And batches over them, aligned by the kernel itself: `align_tokens` refuses some.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from pipeline.alignment.kernels import merge_spans
from pipeline.batches import Ranges, TokenBatch
from schemas.document import tiles_text
from tests.support.reference import Range

TEXT_BYTES = 24


@st.composite
def monotone_offsets(draw: st.DrawFn, max_tokens: int = 12) -> list[Range]:
    """Starts and ends that never decrease, and nothing more."""
    count = draw(st.integers(0, max_tokens))
    places = st.lists(st.integers(0, TEXT_BYTES), min_size=count, max_size=count).map(sorted)
    starts, ends = draw(places), draw(places)
    return [(min(a, b), max(a, b)) for a, b in zip(starts, ends, strict=True)]


@st.composite
def tiling_offsets(draw: st.DrawFn, num_bytes: int = 60) -> list[Range]:
    """Tokens side by side, each of a byte or more, over `num_bytes` bytes."""
    inner = draw(st.sets(st.integers(1, num_bytes - 1)))
    bounds = [0, *sorted(inner), num_bytes]
    return list(pairwise(bounds))


@st.composite
def side_by_side(draw: st.DrawFn) -> list[Range]:
    """Tokens that tile `TEXT_BYTES` bytes, some of which cover none."""
    inner = draw(st.lists(st.integers(0, TEXT_BYTES), max_size=12).map(sorted))
    return list(pairwise([0, *inner, TEXT_BYTES]))


def make_tokens(documents: Sequence[Sequence[Range]], num_text_bytes: int) -> TokenBatch:
    """Return a batch over documents of `num_text_bytes` bytes each."""
    pairs = [pair for document in documents for pair in document]
    offsets = [np.array(document, np.int64).reshape(-1, 2) for document in documents]
    return TokenBatch(
        input_ids=np.arange(len(pairs), dtype=np.uint32),
        byte_offsets=np.array(pairs, np.int32).reshape(-1, 2),
        cu_tokens=np.cumsum([0, *map(len, documents)], dtype=np.int64),
        tiles=np.array([tiles_text(own, num_text_bytes) for own in offsets], np.bool_),
    )


def merged_spans(student: TokenBatch, teacher: TokenBatch) -> Ranges:
    """Return the kernel's teacher_spans of hand-made offsets."""
    spans: Ranges = merge_spans(
        student.byte_offsets,
        student.cu_tokens,
        teacher.byte_offsets,
        teacher.cu_tokens,
        student.tiles & teacher.tiles,
    )
    return spans
