"""`--reuse`: losses of other datasets that a job can take over.

The launcher writes digests of their documents to the run's folder; workers map them, and copy
losses of matches.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from beam_jobs import storage
from beam_jobs.resuming import describe_differences
from beam_jobs.running.run_options import RunOptions
from pipeline.dataset.cache import ListedFile, ShardCache
from pipeline.dataset.files import open_dataset
from pipeline.dataset.score_files import list_scores
from pipeline.drawing.formatting import format_plural
from pipeline.scoring.reusable_losses import (
    ReusableDocuments,
    ReusableLosses,
    ScoredShard,
    scored_shards,
)
from schemas.sidecar import TeacherRule

_LIST = "known.json"
_CACHE_BYTES = 256 << 30


def find_reusable(
    locations: Sequence[str], rule: TeacherRule, run: RunOptions
) -> list[ScoredShard]:
    """Other datasets' shards that the same teacher scored, in any context."""
    found = []
    for location in locations:
        dataset, own, reasons = open_dataset(location), [], []
        for scores in list_scores(dataset.location):
            with_top = rule.distributions is not None
            theirs, ours = (
                _teacher(one, with_top=with_top) for one in (scores.manifest.rule, rule)
            )
            if theirs != ours:
                reasons.append(f"{scores.path}: {describe_differences(theirs, ours)}")
            elif not dataset.has_generation(scores.manifest.dataset):
                reasons.append(f"{scores.path}: the dataset has been made again since")
            else:
                own += scored_shards(dataset, scores)
        if not own:
            why = "; ".join(reasons) or "no teacher has scored it to its end"
            run.say(f"--reuse {location}: nothing can be taken over: {why}")
        found += own
    return found


def save_reusable(shards: Sequence[ScoredShard], run_folder: str, run: RunOptions) -> None:
    """Write digests of shards' documents to a run's folder, unless they are there."""
    files = [asdict(shard.sidecar) for shard in shards]
    body, path = json.dumps(files).encode(), storage.join(run_folder, _LIST)
    if storage.num_bytes_of(path) is not None and storage.read_bytes(path) == body:
        return
    known = ReusableDocuments.merge([shard.list_documents(n) for n, shard in enumerate(shards)])
    run.say(f"--reuse: the losses of {format_plural(len(known), 'different document')} are known")
    for name, values in vars(known).items():
        file = io.BytesIO()
        np.save(file, values)
        _write(run_folder, f"known-{name}.npy", file.getvalue())
    # The list comes last: tables refer to its files by number.
    _write(run_folder, _LIST, body)


def open_reusable(run_folder: str) -> ReusableLosses:
    """Open `save_reusable`'s output on a worker; a local table is mapped."""
    listed = storage.read_bytes(storage.join(run_folder, _LIST))
    tables = (
        _read_table(storage.join(run_folder, f"known-{entry.name}.npy"))
        for entry in fields(ReusableDocuments)
    )
    files = [ListedFile(**file) for file in json.loads(listed)]
    cache = None
    if any("://" in file.url for file in files):
        cache = ShardCache(Path.home() / ".cache" / "vocag" / "shards", _CACHE_BYTES)
    return ReusableLosses(ReusableDocuments(*tables), files, cache=cache)


def _teacher(rule: TeacherRule, *, with_top: bool) -> dict[str, Any]:
    """The teacher's part of a rule; digests cover documents and contexts.

    Entries must be stored by the same rule; losses alone need not.
    """
    without = {"context", "where"} if with_top else {"context", "where", "distributions"}
    return {name: value for name, value in rule.to_json().items() if name not in without}


def _read_table(path: str) -> Any:
    if storage.is_local(path):
        return np.load(path, mmap_mode="r")
    return np.load(io.BytesIO(storage.read_bytes(path)))


def _write(run_folder: str, name: str, data: bytes) -> None:
    storage.write_atomically(storage.join(run_folder, name), data, scratch=run_folder)
