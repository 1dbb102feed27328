"""`--metadata source,meta.score:float64`: fields that travel with each document.

Values may be missing; one of another type than its column's makes its document a dead letter.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from beam_jobs.align.inputs.documents import (
    MetadataField,
    Reason,
    UnusableError,
    Value,
    describe_value,
)
from beam_jobs.job_errors import InputError
from schemas.manifest import MetadataColumn, MetadataType

TYPES: tuple[MetadataType, ...] = get_args(MetadataType)

_MAX_EXACT_FLOAT = float(1 << 53)
_INTEGER = re.compile(r"[+-]?\d+")
_BOOLS = {"true": True, "false": False}
_TYPE_OF: Mapping[frozenset[type], MetadataType] = {
    frozenset([str]): "string",
    frozenset([bool]): "bool",
    frozenset([int]): "int64",
    frozenset([float]): "float64",
    frozenset([int, float]): "float64",
}


def parse_metadata(text: str) -> tuple[MetadataField, ...]:
    """Parse the option; ValueError for an empty name, unknown type, or repeated field.

    Example:
        >>> parse_metadata("source,meta.score:float64")[1]
        MetadataField(name='meta.score', type='float64')
    """
    fields = [_parse_field(part.strip()) for part in text.split(",")] if text else []
    names = [field.name for field in fields]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f'it names "{twice[0]}" twice; name each field once')
    return tuple(fields)


def fit_value(field: MetadataField, value: Any, *, is_text: bool) -> Any:
    """Return a value as its column holds it, unchanged if the type is unknown.

    None and NaN are missing. With `is_text`, as in CSV, strings are converted and "" is missing.
    UnusableError if it doesn't fit.

    Example:
        >>> fit_value(MetadataField("score", "float64"), 3, is_text=False)
        3.0
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if is_text and value == "":
        return None
    fitted = value if field.type is None else _fit(value, field.type, is_text)
    if fitted is None:
        what = describe_value(value)
        detail = f'"{field.name}" is {what} here, its column holds {field.type}'
        raise UnusableError(Reason.BAD_METADATA, detail)
    return None if isinstance(fitted, float) and math.isnan(fitted) else fitted


def settle_columns(
    fields: Sequence[MetadataField], documents: Sequence[Sequence[Any]]
) -> tuple[MetadataField, ...]:
    """Infer missing types from the first documents.

    InputError for a field without a value among them, or with incompatible ones.

    Example:
        >>> settle_columns([MetadataField("score")], [(1,), (0.5,), (None,)])
        (MetadataField(name='score', type='float64'),)
    """
    settled = []
    for place, field in enumerate(fields):
        kinds = {type(values[place]) for values in documents if values[place] is not None}
        kind = field.type or _infer(field.name, kinds, len(documents))
        settled.append(MetadataField(field.name, kind))
    return tuple(settled)


def columns_of(fields: Sequence[MetadataField]) -> tuple[MetadataColumn, ...]:
    """Settled fields as the manifest's columns."""
    return tuple(MetadataColumn(field.name, field.type) for field in fields if field.type)


def _parse_field(text: str) -> MetadataField:
    name, colon, kind = text.rpartition(":")
    if not colon:
        name, kind = text, ""
    if not name:
        raise ValueError(f'"{text}" names no field; write such as source,language,meta.score')
    if colon and kind not in TYPES:
        raise ValueError(f'"{kind}" in "{text}" is not a type; write one of {", ".join(TYPES)}')
    return MetadataField(name, next((known for known in TYPES if known == kind), None))


def _fit(value: Any, kind: MetadataType, is_text: bool) -> Value:
    if kind == "string":
        return value if isinstance(value, str) else None
    if is_text and isinstance(value, str):
        value = _read_text(value, kind)
    if kind == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind == "float64":
        is_exact = isinstance(value, float) or abs(value) <= _MAX_EXACT_FLOAT
        return float(value) if is_exact else None
    if isinstance(value, float):  # pandas stores integers as floats if one is missing
        is_exact = value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT
        return int(value) if is_exact else None
    return value if -(1 << 63) <= value < 1 << 63 else None


def _read_text(text: str, kind: MetadataType) -> Value:
    if kind == "bool":
        return _BOOLS.get(text.lower())
    if _INTEGER.fullmatch(text) and len(text) <= 20:
        return int(text)
    try:
        return float(text)
    except ValueError:
        return None


def _infer(name: str, kinds: Collection[type], num_documents: int) -> MetadataType:
    kind = _TYPE_OF.get(frozenset(kinds))
    if kind is not None:
        return kind
    remedy = f"name its type, such as --metadata {name}:float64 ({', '.join(TYPES)})"
    if not kinds:
        raise InputError(
            f'--metadata: none of the first {num_documents} documents has a value of "{name}": '
            f"check the name, or {remedy}"
        )
    if {list, dict} & {*kinds}:
        raise InputError(
            f'--metadata: values of "{name}" are lists or objects, which no column can hold: name '
            f"a field of an object, such as --metadata {name}.field, or leave {name} out"
        )
    found = " and ".join(sorted(kind.__name__ for kind in kinds))
    raise InputError(
        f'--metadata: values of "{name}" are of type {found} among the first {num_documents} '
        f"documents: {remedy}, and others become dead letters"
    )
