"""Transforms that both jobs use."""

from collections.abc import Iterable
from hashlib import sha256

import apache_beam as beam

_Strings = beam.PCollection[str]
_Gathered = beam.PCollection[tuple[int, Iterable[str]]]


class Gather(beam.PTransform[_Strings, _Gathered]):
    """Bring all elements to one place; what went in is settled and is not computed again."""

    def expand(self, elements: _Strings) -> _Gathered:
        """Return one element, (0, all values)."""
        gathered: _Gathered = (
            elements
            | "ToOneKey" >> beam.Map(_with_one_key).with_output_types(tuple[int, str])
            | "Group" >> beam.GroupByKey()
        )
        return gathered


class Spread(beam.PTransform[_Strings, _Strings]):
    """Hand each element to whichever worker is free; what went in is settled.

    Beam's Reshuffle does the same, but 2.77 pickles a timestamp next to each element.
    """

    def expand(self, elements: _Strings) -> _Strings:
        """Return the same elements."""
        spread: _Strings = (
            elements
            | "ToOwnKey" >> beam.Map(_with_own_key).with_output_types(tuple[int, str])
            | "Group" >> beam.GroupByKey()
            | "DropKey" >> beam.FlatMap(_values).with_output_types(str)
        )
        return spread


def _with_one_key(value: str) -> tuple[int, str]:
    return 0, value


def _with_own_key(value: str) -> tuple[int, str]:
    return int.from_bytes(sha256(value.encode()).digest()[:4], "big"), value


def _values(grouped: tuple[int, Iterable[str]]) -> Iterable[str]:
    return grouped[1]
