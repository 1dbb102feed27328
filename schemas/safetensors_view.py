"""Views of a safetensors file's tensors: the one place that reads such a header.

The `safetensors` library copies what it reads, or maps a file of its own; samples lie inside tars
that are mapped already, and a row reads a few bytes of each.

Layout: 8 bytes N, little-endian; N bytes of JSON; tensors. The JSON names each tensor's dtype,
shape and [start, end) behind it, and holds strings under "__metadata__".
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("<u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "F16": np.dtype("<f2"),
}
"""The dtypes that this project stores."""


class TensorPlace(NamedTuple):
    """Where one tensor lies.

    Attributes:
        start: first byte in the file.
        dtype: of `DTYPES`.
        shape: its shape.
    """

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def read_header(data: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Return the header's JSON and the first byte behind it.

    Args:
        data: the file, or its beginning up to the header's end.

    Raises:
        ValueError: it is cut before the header's end, or the header is no JSON object.

    Example:
        >>> header, body = read_header(sample)
    """
    body = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or body > len(data):
        raise ValueError(f"header claims {body - 8} bytes of {len(data)}")
    header = orjson.loads(data[8:body])
    if not isinstance(header, dict):
        raise ValueError("header is no JSON object")
    return header, body


def tensor_place(entry: Mapping[str, Any], body: int, num_bytes: int) -> TensorPlace:
    """Return where a header's entry says that its tensor lies.

    Args:
        entry: the header's, under the tensor's name.
        body: first byte behind the header.
        num_bytes: of the file.

    Raises:
        ValueError: dtype, shape and place contradict each other or the file's size.
        KeyError: it is no tensor's entry, or of a dtype that this project does not store.
    """
    start, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if (
        type(start) is not int
        or start < 0
        or body + end > num_bytes
        or end - start != prod(shape) * dtype.itemsize
    ):
        claim = f"{entry['dtype']} {list(shape)} tensor"
        raise ValueError(f"{claim} at bytes {start}:{end} of {num_bytes - body}")
    return TensorPlace(body + start, dtype, shape)


def view_tensor(data: bytes | memoryview, body: int, entry: Mapping[str, Any]) -> NDArray[Any]:
    """Return a tensor as a view of `data`: nothing is copied.

    Raises:
        ValueError, KeyError: see `tensor_place`.
    """
    place = tensor_place(entry, body, len(data))
    return np.frombuffer(data, place.dtype, prod(place.shape), place.start).reshape(place.shape)
