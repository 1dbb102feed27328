"""Views of tensors in safetensors files.

The `safetensors` library copies, or maps a file of its own; samples are in mapped tars.

Layout: 8 bytes N, little-endian; N bytes of JSON; tensors. The JSON maps each tensor to its dtype,
shape and [start, end) after it, and "__metadata__" to strings.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("<u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "F16": np.dtype("<f2"),
}
"""The dtypes that this project stores."""

_ITEM_SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def read_header(data: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Return the header's JSON and the first byte after it, from a file or its beginning.

    ValueError if the header is cut or isn't a JSON object.
    """
    body = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or body > len(data):
        raise ValueError(f"header claims {body - 8} bytes of {len(data)}")
    header = orjson.loads(data[8:body])
    if not isinstance(header, dict):
        raise ValueError("header isn't a JSON object")
    return header, body


def view_tensor(data: bytes | memoryview, body: int, entry: Mapping[str, Any]) -> NDArray[Any]:
    """Return a header entry's tensor as a view of `data`.

    ValueError if dtype, shape and place contradict each other or the file's size, KeyError for
    another entry or dtype.
    """
    start, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    count = prod(shape)
    if not _is_placed(start, end, count * dtype.itemsize, len(data) - body):
        raise ValueError(_describe(entry, len(data) - body))
    return np.frombuffer(data, dtype, count, body + start).reshape(shape)


def view_vector(
    data: bytes | memoryview, body: int, entry: Mapping[str, Any], code: str
) -> NDArray[Any]:
    """View a vector as in `view_tensor`; ValueError unless its dtype is `code`."""
    if entry["dtype"] != code or len(entry["shape"]) != 1:
        raise ValueError(f"{entry} is not a vector of {code}")
    return view_tensor(data, body, entry)


def vector_place(
    entry: Mapping[str, Any], length: int, body: int, num_bytes: int
) -> tuple[int, int]:
    """Return a vector's first byte in the file and bytes per element, unread.

    `body` is the first byte after the header. Errors as in `view_tensor`, and ValueError unless it
    is a vector of `length`.

    Example:
        >>> vector_place({"dtype": "U16", "shape": [3], "data_offsets": [4, 10]}, 3, 100, 110)
        (104, 2)
    """
    start, end = entry["data_offsets"]
    size = _ITEM_SIZES[entry["dtype"]]
    if entry["shape"] != [length]:
        raise ValueError(f"{_describe(entry, num_bytes - body)}, expected {length} elements")
    if not _is_placed(start, end, length * size, num_bytes - body):
        raise ValueError(_describe(entry, num_bytes - body))
    return body + start, size


def _is_placed(start: object, end: object, num_bytes: int, available: int) -> bool:
    return (
        type(start) is int and type(end) is int and 0 <= start <= end <= available
    ) and end - start == num_bytes


def _describe(entry: Mapping[str, Any], available: int) -> str:
    start, end = entry["data_offsets"]
    return f"{entry['dtype']} {entry['shape']} tensor at bytes {start}:{end} of {available}"
