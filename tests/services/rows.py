"""Read all rows of a dataset in a process that knows its store.

Arguments: the dataset's URL, a folder for what is fetched, and the state of the run that goes on
(JSON, "" for a new one). Tells the SHA-256 of the rows, and the run's state.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from pipeline.streaming import AlignedRows, Reading, StreamConfig, StreamState


def main(arguments: Sequence[str]) -> int:
    url, cache, state = arguments
    saved = StreamState(**json.loads(state)) if state else None
    config = StreamConfig(Reading(url), seq_length=64, cache_folder=Path(cache))
    rows = AlignedRows(config, saved)
    data = rows.__getitems__(range(len(rows))).buffer.numpy().tobytes()
    told = {"rows": len(rows), "sha256": sha256(data).hexdigest(), "state": asdict(rows.state(0))}
    print(json.dumps(told))
    return 0
