"""A dataset's handle: its samples, checked, and which one is damaged."""

from pathlib import Path

import pytest

from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.groups import count_read
from schemas.document import decode_document
from schemas.errors import DamagedSampleError, DamagedShardError
from schemas.index import ShardIndex
from tests.support.datasets import build_dataset, flip, make_texts, remove_documents


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    build_dataset(tmp_path, make_texts(12))
    return open_dataset(tmp_path)


def indices(dataset: Dataset) -> list[ShardIndex]:
    shards = range(len(dataset.manifest.shards))
    return [dataset.read_index(shard_index, with_names=True) for shard_index in shards]


def test_samples_come_in_the_order_of_the_index(dataset: Dataset) -> None:
    for shard_index, index in enumerate(indices(dataset)):
        samples = [(n, decode_document(s)) for n, s in dataset.samples(shard_index, index)]
        assert [n for n, _ in samples] == list(range(len(index)))
        assert [document.document_id for _, document in samples] == list(index.document_id)
    assert sum(map(len, indices(dataset))) == 12


def test_chosen_samples_are_those_of_the_index(dataset: Dataset) -> None:
    index = dataset.read_index(0, with_names=True)
    last = len(index) - 1
    assert last > 0
    everything = {n: bytes(sample) for n, sample in dataset.samples(0, index)}
    chosen = [(n, bytes(sample)) for n, sample in dataset.samples(0, index, documents=(last, 0))]
    assert chosen == [(last, everything[last]), (0, everything[0])]
    assert list(dataset.samples(0, index, documents=())) == []


def test_removed_samples_are_left_out(tmp_path: Path) -> None:
    texts = make_texts(12)
    gone = [texts[2][0], texts[7][0]]
    left = [pair for pair in texts if pair[0] not in gone]
    build_dataset(tmp_path / "all", texts)
    build_dataset(tmp_path / "left", left)
    remove_documents(tmp_path / "all", *gone)
    rest, fresh = open_dataset(tmp_path / "all"), open_dataset(tmp_path / "left")
    every, num_removed = [], 0
    for number, (own, other) in enumerate(zip(indices(rest), indices(fresh), strict=True)):
        expected = [bytes(sample) for _, sample in fresh.samples(number, other)]
        assert [bytes(sample) for _, sample in rest.samples(number, own)] == expected
        chosen = rest.samples(number, own, documents=reversed(range(len(own))))
        assert [bytes(sample) for _, sample in chosen] == expected[::-1]
        samples = dict(rest.samples(number, own, with_removed=True))
        every += [decode_document(sample).document_id for sample in samples.values()]
        num_removed += len(samples) - len(expected)
    assert (sorted(every), num_removed) == (sorted(name for name, _ in texts), len(gone))
    counted = count_read(rest)
    for own_record, other_record in zip(counted.shards, fresh.manifest.shards, strict=True):
        for name in ("num_documents", "num_text_bytes", "num_student_tokens", "num_teacher_tokens"):
            assert getattr(own_record, name) == getattr(other_record, name)
    assert count_read(fresh) is fresh.manifest
    assert counted.totals["num_bytes"] == rest.manifest.totals["num_bytes"]


def test_damage_is_named(dataset: Dataset) -> None:
    index = dataset.read_index(0, with_names=True)
    tar = Path(dataset.shard(0).url)
    flip(tar, int(index.payload_offset[-1] + index.payload_bytes[-1]) - 1)
    with pytest.raises(DamagedSampleError, match=rf"{index.key[-1]} in shard {tar.name}.*align ag"):
        list(dataset.samples(0, index))
    tar.unlink()
    with pytest.raises(DamagedShardError, match=f"{tar.name} is missing.*align again"):
        list(dataset.samples(0, index))
