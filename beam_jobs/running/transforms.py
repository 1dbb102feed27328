"""Transforms and steps of both jobs."""

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any

import apache_beam as beam

from beam_jobs.resuming import require_shared
from beam_jobs.running.job_progress import worker_progress

_Strings = beam.PCollection[str]
_Gathered = beam.PCollection[tuple[int, Iterable[str]]]


class Gather(beam.PTransform[_Strings, _Gathered]):
    """Bring all elements to one place; the input isn't computed again."""

    def expand(self, elements: _Strings) -> _Gathered:
        """Return one element, (0, all values)."""
        gathered: _Gathered = (
            elements
            | "ToOneKey" >> beam.Map(_with_one_key).with_output_types(tuple[int, str])
            | "Group" >> beam.GroupByKey()
        )
        return gathered


class Spread(beam.PTransform[_Strings, _Strings]):
    """Hand each element to any free worker; the input isn't computed again.

    Beam's Reshuffle (2.77) pickles a timestamp with each.
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


def worker_step(work: Callable[[Any], Iterator[Any]], run_folder: str, kind: Any) -> beam.ParDo:
    """Make a step, with progress, from a generator function."""
    step: beam.ParDo = beam.ParDo(_WorkerStep(work, run_folder)).with_output_types(kind)
    return step


class _WorkerStep(beam.DoFn):
    def __init__(self, work: Callable[[Any], Iterator[Any]], run_folder: str) -> None:
        self._work, self._run_folder = work, run_folder

    def start_bundle(self) -> None:
        require_shared(self._run_folder)

    def process(self, element: Any) -> Iterator[Any]:
        yield from self._work(element)

    def finish_bundle(self) -> None:
        worker_progress(self._run_folder).flush()


def _with_one_key(value: str) -> tuple[int, str]:
    return 0, value


def _with_own_key(value: str) -> tuple[int, str]:
    return int.from_bytes(sha256(value.encode()).digest()[:4], "big"), value


def _values(grouped: tuple[int, Iterable[str]]) -> Iterable[str]:
    return grouped[1]
