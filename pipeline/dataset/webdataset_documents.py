"""Decoded documents as a `webdataset` pipeline.

Unlike `webdataset` itself, it raises at a tar that is cut or has a damaged header.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import webdataset

from pipeline.dataset.files import Dataset, open_dataset
from schemas.document import decode_document


def decoded_documents(path: str, *, seed: int | None = None) -> webdataset.DataPipeline:
    """Return a pipeline of all documents, split by node and DataLoader worker.

    Whole shards are distributed, so workers get unequal numbers of documents, or none;
    `pipeline.streaming` avoids this.

    Args:
        path: the dataset's folder or manifest: a path, or a URL that `fsspec` reads.
        seed: for shuffling shards; None keeps their order.

    Returns:
        a pipeline of dicts: `__key__`, `__url__` and `document`, an `AlignedDocument`. Reading
        raises DamagedShardError and DamagedSampleError.

    Example:
        >>> documents = decoded_documents("aligned")  # doctest: +SKIP
        >>> documents = documents.compose(webdataset.shuffle(1000))
        >>> next(iter(documents))["document"].student.input_ids.dtype
        dtype('int64')
    """
    dataset = open_dataset(path)

    def read(shards: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            yield from _read_shard(dataset, int(shard["url"]))

    numbers = [str(shard) for shard in range(len(dataset.manifest.shards))]
    stages = [webdataset.split_by_node, webdataset.split_by_worker, read]
    if seed is not None:
        stages.insert(0, webdataset.shuffle(len(numbers), seed=seed))
    return webdataset.DataPipeline(webdataset.SimpleShardList(numbers), *stages)


def _read_shard(dataset: Dataset, shard_index: int) -> Iterator[dict[str, Any]]:
    url = dataset.shard(shard_index).url
    index = dataset.read_index(shard_index, with_names=True)
    for place, sample in dataset.samples(shard_index, index):
        document = decode_document(sample)
        yield {"__key__": index.key[place], "__url__": url, "document": document}
