"""A dataset read by the words of its specification, with nothing of the library that wrote it."""

import json
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.numpy import load

Content = tuple[str, str | None]
"""Of a document: its text and its source."""


class DamageError(Exception):
    """A file is not what the manifest, the index or the specification says."""


@dataclass(frozen=True)
class Seen:
    """What a dataset holds at one generation."""

    generation: int
    documents: dict[str, Content]  # by id, those that are read
    removed: frozenset[str]  # ids of those that are not
    letters: dict[str, int]  # dead letters by reason


def read_dataset(folder: Path, file: str = "manifest.json") -> Seen:
    """Read every file that a manifest names, and compare its hash.

    Raises:
        DamageError: with what is wrong.
        FileNotFoundError: no such manifest.
    """
    manifest = json.loads((folder / file).read_bytes())
    letters = _verified(folder, manifest["dead_letters"]).splitlines()
    reasons = Counter(json.loads(line)["reason"] for line in letters)
    _require(reasons == manifest["dead_letters"]["by_reason"], "dead letters", reasons)
    for side in ("student", "teacher"):
        _verified(folder, manifest[side])
    for kept in manifest["generations"]:
        own = json.loads((folder / kept["file"]).read_bytes())["fingerprint"]
        _require(own == kept["fingerprint"], "kept manifest", kept)
    left_out = set()
    if listed := manifest.get("removed"):
        rows = pq.read_table(BytesIO(_verified(folder, listed))).to_pylist()
        left_out = {(row["shard"], row["document"]) for row in rows}
        _require(len(left_out) == listed["count"], "removed", rows)
    documents: dict[str, Content] = {}
    removed = set()
    for shard, record in enumerate(manifest["shards"]):
        for place, (name, content) in enumerate(_read_shard(folder, record)):
            _require(name not in documents and name not in removed, "twice", name)
            if (shard, place) in left_out:
                removed.add(name)
            else:
                documents[name] = content
    totals = manifest["totals"]["num_documents"], len(left_out)
    _require(totals == (len(documents) + len(removed), len(removed)), "totals", totals)
    return Seen(manifest["generation"], documents, frozenset(removed), dict(reasons))


def _read_shard(folder: Path, record: dict[str, Any]) -> list[tuple[str, Content]]:
    data = _verified(folder, record)
    own = {name.removeprefix("index_"): record[name] for name in record if "index_" in name}
    samples = []
    for row in pq.read_table(BytesIO(_verified(folder, own))).to_pylist():
        tensors = load(data[row["payload_offset"] :][: row["payload_bytes"]])
        text = tensors["text"].tobytes()
        for side in ("student", "teacher"):
            widths = tensors[f"{side}.token_bytes"]
            found = len(widths), int(widths.sum())
            _require(found == (row[f"num_{side}_tokens"], len(text)), "tokens", row)
        samples.append((row["document_id"], (text.decode(), row["metadata.source"])))
    return samples


def _verified(folder: Path, record: dict[str, Any]) -> bytes:
    data = (folder / record["file"]).read_bytes()
    found = sha256(data).hexdigest(), len(data)
    _require(found == (record["sha256"], record.get("num_bytes", len(data))), "file", record)
    return data


def _require(holds: bool, what: str, where: object) -> None:
    if not holds:
        raise DamageError(f"{what}: {str(where)[:300]}")
