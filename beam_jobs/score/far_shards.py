"""Find shards whose losses are far from the others', because a server went wrong in between.

The check around each shard uses one text, which a cache may answer right.
"""

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from beam_jobs import storage
from pipeline.scoring.engines.interface import EngineError
from schemas.document_score_table import document_scores_name
from schemas.sidecar import SidecarRecord

FAR_SHARDS_FILE = "far-shards.json"

# Nats a token: what shards of one corpus may differ by in any case, how often their usual distance
# from each other, and the noise of a mean of n tokens, which come in documents, times sqrt(n).
_USUAL, _SPREADS, _NOISE = 1.0, 5.0, 24.0
_NORMAL = 1.4826  # standard deviations in a median distance
_SAME = 0.1
_SHOWN = 5


class FarShard(NamedTuple):
    """An outlying sidecar, its mean loss and the others' median mean, in nats."""

    record: SidecarRecord
    mean: float
    others: float


def find_far_shards(records: Sequence[SidecarRecord]) -> list[FarShard]:
    """Find shards whose mean loss is far from the others'.

    Far means more than 1 nat, plus five times the others' spread, plus the noise of few tokens.
    """
    known = [record for record in records if record.num_losses]
    means = np.array([record.loss_sum / record.num_losses for record in known])
    found = []
    for place, record in enumerate(known if len(known) > 1 else ()):
        others: NDArray[np.float64] = np.delete(means, place)
        middle = float(np.median(others))
        spread = _NORMAL * float(np.median(np.abs(others - middle)))
        allowed = _USUAL + _SPREADS * spread + _NOISE / record.num_losses**0.5
        if abs(means[place] - middle) > allowed:
            found.append(FarShard(record, float(means[place]), middle))
    return found


def refuse_far_shards(
    records: Sequence[SidecarRecord],
    *,
    accepted: Collection[str],
    dataset: str,
    run_folder: str,
    started: float,
) -> None:
    """Remove outlying shards' sidecars, and raise EngineError.

    Shards that come out the same in a later run are accepted, as are those whose SHA-256 is in
    `accepted`. The run's folder notes them with `started`: a step that Beam repeats isn't a later
    run.
    """
    path = storage.join(run_folder, FAR_SHARDS_FILE)
    noted: dict[str, dict[str, float]] = {}
    if storage.num_bytes_of(path) is not None:
        noted = json.loads(storage.read_bytes(path))

    def came_out_the_same(shard: FarShard) -> bool:
        then = noted.get(shard.record.shard, {"started": started})
        return then["started"] != started and abs(shard.mean - then["mean"]) <= _SAME

    far = [
        shard
        for shard in find_far_shards(records)
        if shard.record.sha256 not in accepted and not came_out_the_same(shard)
    ]
    if not far:
        return
    # Removed before it is noted: so every noted shard is scored again, even after a kill.
    names = [shard.record.file for shard in far]
    storage.delete_files(dataset, [*names, *map(document_scores_name, names)])
    removed = {shard.record.shard: {"mean": shard.mean, "started": started} for shard in far}
    data = json.dumps({**noted, **removed}, indent=1).encode()
    storage.write_atomically(path, data, scratch=run_folder)
    shown = ", ".join(
        f"{shard.record.shard} {shard.mean:.2f} (the others {shard.others:.2f})"
        for shard in far[:_SHOWN]
    )
    more = f" and {len(far) - _SHOWN} more" if len(far) > _SHOWN else ""
    raise EngineError(
        f"the mean loss of {len(far)} of {len(records)} shards is far from the rest, in nats a "
        f"token: {shown}{more}. A server that goes wrong for a while gives such losses, so they "
        "have been removed: check the servers; the next run scores these shards again, and "
        "accepts losses that come out the same"
    )
