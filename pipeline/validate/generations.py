"""What a dataset that grew says of its earlier states, and of the documents it leaves out."""

import numpy as np

from pipeline.dataset.files import Dataset
from pipeline.dataset.reading import read_generation
from pipeline.validate.findings import Findings
from schemas.errors import DatasetError, SchemaVersionError


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
    _check_removed(dataset, findings)


def _check_removed(dataset: Dataset, findings: Findings) -> None:
    try:
        removed = dataset.removed
    except (DatasetError, OSError) as error:
        findings.add("removed", str(error))
        return
    if removed is None:
        return
    shards = dataset.manifest.shards
    counts = np.array([*(shard.num_documents for shard in shards), 0], np.int64)
    limits = counts[np.minimum(removed.shard, len(shards))]
    for place in np.flatnonzero(removed.document >= limits).tolist():
        shard, document = int(removed.shard[place]), int(removed.document[place])
        text = f"the list names document {document} of shard {shard}: there is none"
        findings.add("removed", text)
