"""A dataset read by the words of its specification, with nothing of the library that wrote it."""

import json
import tarfile
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow.parquet as pq
from safetensors.numpy import load

Content = tuple[str, str | None]
"""Of a document: its text and its source."""


class DamageError(Exception):
    """A file is not what the manifest, the index or the specification says."""


@dataclass(frozen=True)
class Seen:
    """What a dataset holds at one generation.

    Attributes:
        generation: its number.
        documents: by id, those that are read.
        removed: ids of those that are not.
        letters: dead letters by reason.
    """

    generation: int
    documents: dict[str, Content]
    removed: frozenset[str]
    letters: dict[str, int]


def read_dataset(folder: Path, file: str = "manifest.json") -> Seen:
    """Read and check every byte that a manifest names.

    Raises:
        DamageError: with what is wrong.
        FileNotFoundError: no such manifest.
    """
    manifest = json.loads((folder / file).read_bytes())
    _require(manifest["fingerprint"] == _fingerprint(manifest), "fingerprint", file)
    shards = [_read_shard(folder, record) for record in manifest["shards"]]
    for name, total in manifest["totals"].items():
        _require(total == sum(s[name] for s in manifest["shards"]), "totals", name)
    letters = _verified(folder, manifest["dead_letters"], "dead letters").splitlines()
    reasons = Counter(json.loads(line)["reason"] for line in letters)
    _require(reasons == manifest["dead_letters"]["by_reason"], "dead letters", reasons)
    for side in ("student", "teacher"):
        _verified(folder, manifest[side], side)
    for kept in manifest["generations"]:
        own = json.loads((folder / kept["file"]).read_bytes())["fingerprint"]
        _require(own == kept["fingerprint"], "kept manifest", kept)
    left_out = _read_removed(folder, manifest.get("removed"))
    documents: dict[str, Content] = {}
    removed = set()
    for shard, samples in enumerate(shards):
        for place, (name, content) in enumerate(samples):
            _require(name not in documents and name not in removed, "twice", name)
            if (shard, place) in left_out:
                removed.add(name)
            else:
                documents[name] = content
    _require(len(removed) == len(left_out), "removed", left_out)
    return Seen(manifest["generation"], documents, frozenset(removed), dict(reasons))


def _read_shard(folder: Path, record: dict[str, Any]) -> list[tuple[str, Content]]:
    data = _verified(folder, record, "shard")
    own = {name.removeprefix("index_"): record[name] for name in record if "index_" in name}
    index = pq.read_table(BytesIO(_verified(folder, own, "index"))).to_pylist()
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        members = [(member.name, member.offset_data, member.size) for member in tar]
    rows = [(f"{r['key']}.safetensors", r["payload_offset"], r["payload_bytes"]) for r in index]
    _require(members == rows, "index", f"{record['index_file']}: {members} {rows}")
    _require(len(index) == record["num_documents"], "counts", record["file"])
    samples = []
    for row in index:
        sample = data[row["payload_offset"] :][: row["payload_bytes"]]
        _require(crc32(sample) == row["crc32"], "checksum", row["document_id"])
        samples.append((row["document_id"], _read_sample(sample, row)))
    return samples


def _read_sample(sample: bytes, row: dict[str, Any]) -> Content:
    header = json.loads(sample[8 : 8 + int.from_bytes(sample[:8], "little")])["__metadata__"]
    tensors = load(sample)
    text = tensors["text"].tobytes()
    key = sha256(row["document_id"].encode()).hexdigest()[:32]
    _require(key == row["key"] and header["document_id"] == row["document_id"], "id", header)
    _require(sha256(text).hexdigest() == header["text_sha256"], "text", row)
    for side in ("student", "teacher"):
        widths = tensors[f"{side}.token_bytes"]
        _require(len(widths) == row[f"num_{side}_tokens"], "counts", row)
        _require(int(widths.sum()) == len(text), "tokens", row)
    return text.decode(), row["metadata.source"]


def _read_removed(folder: Path, record: dict[str, Any] | None) -> set[tuple[int, int]]:
    if record is None:
        return set()
    rows = pq.read_table(BytesIO(_verified(folder, record, "removed"))).to_pylist()
    places = [(row["shard"], row["document"]) for row in rows]
    _require(places == sorted(set(places)) and len(places) == record["count"], "removed", places)
    return set(places)


def _fingerprint(manifest: dict[str, Any]) -> str:
    body: dict[str, Any] = {
        "schema_version": manifest["schema_version"],
        "shards": [[s["file"], s["sha256"], s["index_sha256"]] for s in manifest["shards"]],
        "removed": (manifest.get("removed") or {}).get("sha256"),
        **{
            s: [manifest[s]["sha256"], manifest[s]["special_strings"]]
            for s in ("student", "teacher")
        },
    }
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _verified(folder: Path, record: dict[str, Any], what: str) -> bytes:
    data = (folder / record["file"]).read_bytes()
    _require(sha256(data).hexdigest() == record["sha256"], what, record["file"])
    _require(len(data) == record.get("num_bytes", len(data)), what, record["file"])
    return data


def _require(holds: bool, what: str, where: object) -> None:
    if not holds:
        raise DamageError(f"{what}: {str(where)[:300]}")
