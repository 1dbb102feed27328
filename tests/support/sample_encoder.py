"""A document as a sample's bytes, the plain way: the slow twin of `pipeline.dataset.encoding`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.document import AlignedDocument, sample_header, tiles_text

DTYPE_NAMES = {1: "U8", 2: "U16", 4: "U32"}


def encode_document(document: AlignedDocument) -> bytes:
    """Return the sample's bytes; each tensor in the narrowest of uint8, uint16 and uint32."""
    first, end = document.teacher_spans.T
    starts = np.maximum.accumulate(np.where(end > first, first, 0))
    arrays = {"span.advance": np.diff(starts, prepend=0), "span.width": end - first}
    for side, tokens in (("student", document.student), ("teacher", document.teacher)):
        arrays[f"{side}.input_ids"] = tokens.input_ids
        if tiles_text(tokens.byte_offsets, document.num_text_bytes):
            arrays[f"{side}.token_bytes"] = np.diff(tokens.byte_offsets).ravel()
        else:
            arrays[f"{side}.byte_offsets"] = tokens.byte_offsets
    tensors: dict[str, NDArray[Any]] = {
        name: array.astype(np.min_scalar_type(int(array.max(initial=0))))
        for name, array in arrays.items()
    }
    if document.text is not None:
        tensors["text"] = np.frombuffer(document.text, np.uint8)
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    layout = tuple(
        (name, DTYPE_NAMES[array.itemsize], 2 if array.ndim == 2 else 1)
        for name, array in tensors.items()
    )
    places: list[int] = []
    stop = 0
    for array in tensors.values():
        start, stop = stop, stop + array.nbytes
        places += [len(array), start, stop]
    header = sample_header(
        document.document_id, document.text_sha256, document.num_text_bytes, layout, places
    )
    return b"".join([header, *(array.tobytes() for array in tensors.values())])
