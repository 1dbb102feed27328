"""The longest student token that some bytes begin with, found by hashes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled, compiled_in_place

NONE = -1
_HASH_START, _HASH_FACTOR = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a


class Tables(NamedTuple):
    """Two vocabularies and the map between them.

    Attributes:
        mapped: int32 [2, V_teacher], see `VocabularyMap`.
        student_bytes: of each token, one after another.
        student_starts: [V_student + 1].
        slots: int32 [power of 2], student ids by the hash of their bytes, -1 if free.
    """

    mapped: NDArray[np.int32]
    student_bytes: NDArray[np.uint8]
    student_starts: NDArray[np.int64]
    teacher_bytes: NDArray[np.uint8]
    teacher_starts: NDArray[np.int64]
    slots: NDArray[np.int32]


@compiled_in_place
def insert_entries(
    order: NDArray[np.int32],
    flat: NDArray[np.uint8],
    starts: NDArray[np.int64],
    slots: NDArray[np.int32],
) -> None:
    """Fill `slots` with ids by the hash of their bytes; the first of equal ones stays."""
    for token_id in order:
        entry = flat[starts[token_id] : starts[token_id + 1]]
        value = _HASH_START
        for byte in entry:
            value = (value ^ np.uint64(byte)) * _HASH_FACTOR
        slot = _first_slot(value, len(slots))
        while slots[slot] >= 0:
            other = slots[slot]
            if same_bytes(flat[starts[other] : starts[other + 1]], entry):
                break
            slot = (slot + 1) % len(slots)
        if slots[slot] < 0:
            slots[slot] = token_id


@compiled
def find_prefixes(
    flat: NDArray[np.uint8], starts: NDArray[np.int64], tables: Tables
) -> NDArray[np.int32]:
    """Return `find_prefix` of each entry."""
    found = np.empty(len(starts) - 1, np.int32)
    for entry in range(len(found)):
        found[entry] = find_prefix(flat[starts[entry] : starts[entry + 1]], tables)
    return found


@compiled_in_place
def find_prefix(text: NDArray[np.uint8], tables: Tables) -> int:
    """Return the longest student token that some bytes begin with, or -1."""
    best, value = NONE, _HASH_START
    for length in range(1, len(text) + 1):
        value = (value ^ np.uint64(text[length - 1])) * _HASH_FACTOR
        found = _of_slot(text[:length], value, tables)
        if found >= 0:
            best = found
    return best


@compiled
def find_divisions(token_ids: NDArray[np.int64], tables: Tables) -> NDArray[np.int32]:
    """Return every two student tokens that together spell one of some tokens, int32 [2, N]."""
    starts, count = tables.student_starts, 0
    for token_id in token_ids:
        count += max(starts[token_id + 1] - starts[token_id] - 1, 0)
    found, count = np.empty((2, count), np.int32), 0
    for token_id in token_ids:
        text = tables.student_bytes[starts[token_id] : starts[token_id + 1]]
        for length in range(1, len(text)):
            first, second = _find(text[:length], tables), _find(text[length:], tables)
            if first >= 0 and second >= 0:
                found[0, count], found[1, count] = first, second
                count += 1
    return found[:, :count]


@compiled_in_place
def _find(text: NDArray[np.uint8], tables: Tables) -> int:
    """Return the student token of exactly these bytes, or -1."""
    value = _HASH_START
    for byte in text:
        value = (value ^ np.uint64(byte)) * _HASH_FACTOR
    return _of_slot(text, value, tables)


@compiled_in_place
def _of_slot(text: NDArray[np.uint8], value: np.uint64, tables: Tables) -> int:
    """Return the student token of bytes with this hash, or -1."""
    slot = _first_slot(value, len(tables.slots))
    while tables.slots[slot] >= 0:
        token_id = tables.slots[slot]
        at, stop = tables.student_starts[token_id], tables.student_starts[token_id + 1]
        if same_bytes(tables.student_bytes[at:stop], text):
            return int(token_id)
        slot = (slot + 1) % len(tables.slots)
    return NONE


@compiled_in_place
def _first_slot(value: np.uint64, num_slots: int) -> np.int64:
    # The high bits are mixed best; the number of slots is a power of two.
    return np.int64((value ^ (value >> np.uint64(32))) & np.uint64(num_slots - 1))


@compiled_in_place
def same_bytes(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> bool:
    """Whether two byte arrays are equal."""
    differ = len(first) != len(second)
    place = 0
    while not differ and place < len(first):
        differ = first[place] != second[place]
        place += 1
    return not differ
