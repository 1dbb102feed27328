"""`--reuse`: which losses of other datasets a job can take over, listed once for its workers.

The launcher reads the named datasets' tokens and writes a table of digests to the run's folder;
a worker maps it, and takes the losses of the documents that it finds there.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from beam_jobs import storage
from beam_jobs.running.run_options import RunOptions
from beam_jobs.runs import describe_differences
from pipeline.dataset.cache import ListedFile, ShardCache
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.drawing.formatting import format_plural
from pipeline.scoring.known_losses import KnownDocuments, KnownLosses, list_known, scored_shards
from pipeline.scoring.stored_losses import ScoreFiles, list_scores
from schemas.sidecar import SidecarRecord, TeacherRule

_LIST = "known.json"
_CACHE_BYTES = 256 << 30


@dataclass(frozen=True)
class _Source:
    """One scored shard."""

    dataset: Dataset
    scores: ScoreFiles
    shard: int
    record: SidecarRecord


def list_reusable(
    reuse: Sequence[str], rule: TeacherRule, run_folder: str, run: RunOptions
) -> bool:
    """List, in a run's folder, the documents whose losses can be taken over.

    Args:
        reuse: the datasets.
        rule: of the losses that are wanted.
        run_folder: the run's.
        run: says what was found.

    Returns:
        whether there are any.

    Raises:
        DatasetError: a dataset, a shard or a sidecar is missing or damaged.
    """
    sources = [source for location in reuse for source in _sources_of(location, rule, run)]
    if not sources:
        return False
    files = [asdict(source.scores.sidecar(source.record)) for source in sources]
    body, path = json.dumps(files).encode(), storage.join(run_folder, _LIST)
    # The list comes last: one of these files stands for the tables of these files.
    if storage.num_bytes_of(path) is not None and storage.read_bytes(path) == body:
        return True
    known = KnownDocuments.merge(
        [
            list_known(source.dataset, source.scores, source.shard, source.record, sidecar=number)
            for number, source in enumerate(sources)
        ]
    )
    run.say(f"--reuse: the losses of {format_plural(len(known), 'different document')} are known")
    for name, values in vars(known).items():
        file = io.BytesIO()
        np.save(file, values)
        _write(run_folder, f"known-{name}.npy", file.getvalue())
    _write(run_folder, _LIST, body)
    return True


def open_reusable(run_folder: str) -> KnownLosses:
    """Return, on a worker, what `list_reusable` has listed; a local table is mapped."""
    files = [
        ListedFile(**file)
        for file in json.loads(storage.read_bytes(storage.join(run_folder, _LIST)))
    ]
    cache = None
    if any("://" in file.url for file in files):
        cache = ShardCache(Path.home() / ".cache" / "vocag" / "shards", _CACHE_BYTES)
    tables = (
        _read_table(storage.join(run_folder, f"known-{entry.name}.npy"))
        for entry in fields(KnownDocuments)
    )
    return KnownLosses(KnownDocuments(*tables), files, cache=cache)


def _sources_of(location: str, rule: TeacherRule, run: RunOptions) -> list[_Source]:
    """Return a dataset's shards that the same teacher has scored, in whatever contexts."""
    dataset = open_dataset(location)
    sources, reasons = [], []
    for scores in list_scores(dataset.location):
        theirs, ours = (_teacher(one) for one in (scores.manifest.rule, rule))
        if theirs != ours:
            reasons.append(f"{scores.path}: {describe_differences(theirs, ours)}")
        elif not dataset.has_generation(scores.manifest.dataset):
            reasons.append(f"{scores.path}: the dataset was made anew since")
        else:
            shards = scored_shards(dataset, scores)
            sources += [_Source(dataset, scores, shard, record) for shard, record in shards]
    if not sources:
        why = "; ".join(reasons) or "no teacher has scored it to its end"
        run.say(f"--reuse {location}: nothing can be taken over: {why}")
    return sources


def _teacher(rule: TeacherRule) -> dict[str, Any]:
    """Return whose losses they are; of which documents in which contexts, digests say."""
    body = rule.to_json()
    return {name: value for name, value in body.items() if name not in ("context", "where")}


def _read_table(path: str) -> Any:
    if storage.is_local(path):
        return np.load(path, mmap_mode="r")
    return np.load(io.BytesIO(storage.read_bytes(path)))


def _write(run_folder: str, name: str, data: bytes) -> None:
    storage.write_atomically(storage.join(run_folder, name), data, scratch=run_folder)
