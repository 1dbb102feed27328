"""Documents of a dataset whose texts can't be had: counted and named before any is aligned.

A dataset need not keep texts, and not every tokenizer's tokens spell them (WordPiece, or one whose
normaliser changed the text). Who reads such a dataset must know what is lost before hours of work.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import apache_beam as beam

from beam_jobs import storage
from beam_jobs.align.inputs.datasets import InputDataset
from beam_jobs.align.inputs.documents import DeadLetter, ReadingRules, Reason
from beam_jobs.align.inputs.parts import decode_task
from beam_jobs.align.inputs.reading import read_part, show_progress
from beam_jobs.running.transforms import Gather, Spread, worker_step
from beam_jobs.runs import read_commit
from pipeline.drawing.formatting import format_count, format_share
from schemas.records import Count, read_record, write_record

LOST_TEXTS_FILE = "lost_texts.json"
"""In the run's folder: the count of all tasks."""

_MOST_NAMED = 5


@dataclass(frozen=True)
class LostTexts:
    """How many documents' texts can't be had, and the first of their ids, in order."""

    count: Count
    first: tuple[str, ...]


def count_lost_texts(
    pipeline: beam.Pipeline, tasks: Sequence[str], rules: ReadingRules, run_folder: str
) -> None:
    """Describe the job that reads all documents once and counts those without a text."""
    count = partial(_count, rules=rules, run_folder=run_folder)
    _ = (
        pipeline
        | "Tasks" >> beam.Create(tasks)
        | "SpreadTasks" >> Spread()
        | "CountTask" >> worker_step(count, run_folder, str)
        | "GatherCounts" >> Gather()
        | "WriteCount" >> beam.Map(_write_sum, run_folder).with_output_types(str)
    )


def _count(task: str, rules: ReadingRules, run_folder: str) -> Iterator[str]:
    """Yield the `LostTexts` of a task, as JSON."""
    outcomes = (o for part in decode_task(task) for o in read_part(part, rules))
    lost = [
        str(outcome.document_id)
        for outcome in show_progress(outcomes, run_folder)
        if isinstance(outcome, DeadLetter) and outcome.reason == Reason.TEXT_LOST
    ]
    yield write_record(LostTexts(len(lost), tuple(sorted(lost)[:_MOST_NAMED])))


def _write_sum(counts: tuple[int, Iterable[str]], run_folder: str) -> str:
    """Write the sum of what tasks lack, which the launcher reads; return its path."""
    parts = [read_record(part, LostTexts) for part in counts[1]]
    first = sorted(name for part in parts for name in part.first)[:_MOST_NAMED]
    whole = LostTexts(sum(part.count for part in parts), tuple(first))
    path = storage.join(run_folder, LOST_TEXTS_FILE)
    storage.write_atomically(path, write_record(whole).encode(), scratch=run_folder)
    return path


def read_lost_texts(run_folder: str) -> LostTexts | None:
    """Return what the job has counted, None before it has."""
    return read_commit(storage.join(run_folder, LOST_TEXTS_FILE), LostTexts)


def describe_lost_texts(lost: LostTexts, dataset: InputDataset) -> str:
    """Return how many documents have no text, the first of them, and the remedy."""
    named = ", ".join(f'"{name}"' for name in lost.first)
    more = ", …" if lost.count > len(lost.first) else ""
    share = format_share(lost.count, dataset.num_documents)
    return (
        f"{format_count(lost.count)} of {format_count(dataset.num_documents)} documents ({share}) "
        f"of {dataset.dataset.location} can't be aligned again: it keeps no text of them, and "
        "neither the student's nor the teacher's tokens spell it (SHA-256 compared). They are "
        f"{named}{more}. Align the files that it was made of, with --keep-text if this is to be "
        "possible later, or leave these documents out with a larger --max-dead-letters"
    )
