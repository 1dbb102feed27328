"""What a dataset that grew says of its earlier states, and of the documents it leaves out."""

from hashlib import sha256

import numpy as np

from pipeline.dataset.files import Dataset
from pipeline.dataset.reading import read_generation
from pipeline.validate.findings import Findings
from pipeline.validate.shard import describe
from schemas.errors import DamagedShardError, DatasetError, SchemaVersionError
from schemas.manifest import Manifest, RemovedRecord
from schemas.removed import RemovedDocuments, decode_removed


def check_generations(dataset: Dataset, findings: Findings) -> None:
    """Check the kept manifests and the list of removed documents.

    Example:
        >>> check_generations(dataset, findings)  # doctest: +SKIP
    """
    manifest = dataset.manifest
    numbers = [entry.number for entry in manifest.generations]
    if numbers != list(range(len(numbers))) or len(numbers) != manifest.generation:
        text = f"generation {manifest.generation} lists {numbers} as the earlier ones"
        findings.add("generations", text)
    for number in sorted(set(numbers) - {manifest.generation}):
        try:
            before = read_generation(dataset.location, manifest, number)
        except (DatasetError, SchemaVersionError, OSError) as error:
            findings.add("generations", str(error))
            continue
        if before.shards != manifest.shards[: len(before.shards)]:
            text = f"the shards of generation {number} are not the first ones of this"
            findings.add("generations", text)
    if manifest.removed is not None:
        _check_removed(dataset, manifest.removed, findings)


def _check_removed(dataset: Dataset, record: RemovedRecord, findings: Findings) -> None:
    try:
        data = dataset.read_file(record.file)
    except OSError as error:
        findings.add("files", f"{record.file} can't be read: {describe(error)}")
        return
    found = sha256(data).hexdigest()
    if found != record.sha256:
        text = f"{record.file} has SHA-256 {found}, the manifest says {record.sha256}"
        findings.add("sha256", text)
        return
    try:
        removed = decode_removed(data)
    except DamagedShardError as error:
        findings.add("removed", f"{record.file}: {error}")
        return
    if len(removed) != record.count:
        text = f"{record.file} lists {len(removed)}, the manifest says {record.count}"
        findings.add("removed", text)
    _check_places(dataset.manifest, removed, record.file, findings)


def _check_places(
    manifest: Manifest, removed: RemovedDocuments, file: str, findings: Findings
) -> None:
    counts = np.array([*(shard.num_documents for shard in manifest.shards), 0], np.int64)
    limits = counts[np.minimum(removed.shard, len(manifest.shards))]
    for place in np.flatnonzero(removed.document >= limits).tolist():
        shard, document = int(removed.shard[place]), int(removed.document[place])
        findings.add("removed", f"{file} names document {document} of shard {shard}: there is none")
