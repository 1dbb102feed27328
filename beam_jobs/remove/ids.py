"""Lists of document ids, and where in a dataset these documents are."""

from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from beam_jobs import storage
from beam_jobs.errors import OptionsError
from pipeline.command_line.failures import hinted
from pipeline.command_line.nearest import look_near
from pipeline.dataset.files import Dataset
from schemas.removed import RemovedDocuments

_JSON_LINES = (".jsonl", ".ndjson")
_FIELDS = ("document_id", "id")


def read_ids(path: str) -> list[str]:
    """Return the ids that a file lists, each once, in its order.

    It has one id a line; if its name ends in .jsonl or .ndjson, one JSON object a line with
    `document_id` or `id`, as dead letters have, or one JSON string. OptionsError if there is no
    such file, no id in it, or a line without one.
    """
    try:
        lines = storage.read_bytes(path).splitlines()
    except FileNotFoundError as error:
        missing = OptionsError(f"--ids {path} is not there; name a file of ids, one a line")
        raise (hinted(missing, look_near(path)) if storage.is_local(path) else missing) from error
    read = _read_json if path.endswith(_JSON_LINES) else bytes.decode
    ids = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                ids.append(read(line))
            except (ValueError, TypeError) as error:
                raise OptionsError(f"--ids {path}: line {number} holds no id ({error})") from error
    if not ids:
        raise OptionsError(f"--ids {path} lists no id; write one a line")
    return list(dict.fromkeys(ids))


def find_documents(dataset: Dataset, ids: list[str]) -> tuple[RemovedDocuments, list[str]]:
    """Return where some ids' documents are, and the unknown ids; errors as `Dataset.read_ids`."""
    wanted = pa.array(ids, pa.string())

    def match(shard_index: int) -> tuple[NDArray[np.int64], pa.Array]:
        names = dataset.read_ids(shard_index)
        places = np.flatnonzero(pc.is_in(names, value_set=wanted).to_numpy())
        return places, pa.array(names.take(places).to_pylist(), pa.string())

    matches = list(dataset.map_shards(match))
    places = [np.empty(0, np.int64), *(own for own, _ in matches)]
    shards = np.repeat(np.arange(len(places)) - 1, [len(own) for own in places])
    found = pa.concat_arrays([pa.array([], pa.string()), *(names for _, names in matches)])
    unknown = wanted.filter(pc.invert(pc.is_in(wanted, value_set=found)))
    return RemovedDocuments(shards, np.concatenate(places)), unknown.to_pylist()


def _read_json(line: bytes) -> str:
    value: Any = orjson.loads(line)
    if isinstance(value, dict):
        value = next((value[name] for name in _FIELDS if value.get(name) is not None), None)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise TypeError("write a string, or an object with document_id or id")
    return value
