"""A fixed sample of datasets, spread evenly over their shards, for counting cells."""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.chosen_documents import ChosenDocuments
from pipeline.distributions.walk import RowFields
from schemas.document import decode_spans, decode_tensors
from schemas.errors import DamagedSampleError, DamagedShardError

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 1 << 22
"""Student tokens of all datasets together: 4 million take seconds, and show what is not rare."""

_SHARDS = 64
"""At most, of a dataset: from each a stretch is read, of a remote one in few requests."""


def sample_documents(
    datasets: Sequence[ChosenDocuments], *, num_tokens: int = SAMPLE_TOKENS
) -> Iterator[RowFields]:
    """Yield chosen documents, equally many tokens of each dataset.

    A shard's first documents are a fair sample: a hash orders them. Damaged samples are left out
    with a warning.

    Raises:
        DamagedShardError: an index, or the list of removed documents, is damaged.
    """
    for chosen in datasets:
        yield from _of_dataset(chosen, num_tokens // len(datasets))


def _of_dataset(chosen: ChosenDocuments, num_tokens: int) -> Iterator[RowFields]:
    for named in chosen.scores:
        named.scores.read_ranks(named.columns)
    records = chosen.dataset.manifest.shards
    filled = np.flatnonzero([record.num_documents for record in records])
    places = np.linspace(0, len(filled) - 1, min(len(filled), _SHARDS)).round().astype(np.int64)
    shards = filled[places].tolist()
    for number, shard_index in enumerate(shards):
        # Later shards make up for a small one.
        wanted = num_tokens // (len(shards) - number)
        for row in _of_shard(chosen, shard_index, wanted):
            num_tokens -= len(row.input_ids)
            yield row


def _of_shard(chosen: ChosenDocuments, shard_index: int, num_tokens: int) -> Iterator[RowFields]:
    index, kept = chosen.read(shard_index, with_names=True)
    read = np.arange(len(index)) if kept is None else np.flatnonzero(kept)
    before = np.cumsum(index.num_student_tokens[read]) - index.num_student_tokens[read]
    documents = read[before < num_tokens].tolist()
    try:
        for _, sample in chosen.dataset.samples(shard_index, index, documents=documents):
            yield _row_of(decode_tensors(sample)[0])
    except (DamagedSampleError, DamagedShardError) as error:
        logger.warning("cells are counted without the rest of a shard: %s", error)


def _row_of(tensors: dict[str, NDArray[np.unsignedinteger]]) -> RowFields:
    student, teacher = (
        tensors[f"{side}.input_ids"].astype(np.int32) for side in ("student", "teacher")
    )
    spans = decode_spans(tensors["span.advance"], tensors["span.width"]).astype(np.int32)
    return RowFields(
        input_ids=student,
        loss_mask=np.ones(len(student), np.float32),
        # A row's spans are those of labels, the tokens after its own.
        teacher_spans=np.concatenate([spans[1:], np.zeros((1, 2), np.int32)])[: len(spans)],
        teacher_input_ids=teacher,
        cu_seqlens=np.array([0, len(student)], np.int32),
        teacher_cu_seqlens=np.array([0, len(teacher)], np.int32),
        teacher_losses=np.empty(0, np.float32),
    )
