"""Our shards in the hands of other readers: every array of every document, as documented."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch.utils.data
import webdataset

from pipeline.dataset.webdataset_documents import decoded_documents
from schemas.document import document_key
from schemas.errors import DamagedSampleError, DamagedShardError
from tests.support.streaming_data import make_documents, write_dataset

DOCS = Path(__file__).parents[3] / "docs" / "streaming.md"

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


@pytest.fixture
def dataset(tmp_path):
    """Five shards of five documents."""
    documents = make_documents([1 + 13 * number for number in range(25)])
    return write_dataset(tmp_path / "data", documents, shard_sizes=[5] * 5)


def documented_code(marker):
    """Return the code block of docs/streaming.md that contains a string."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if marker in block]
    return block


def check_documents(found, expected):
    """Compare every array of every document."""
    found = sorted(found, key=lambda document: document.document_id)
    expected = sorted(expected, key=lambda document: document.document_id)
    assert [d.document_id for d in found] == [d.document_id for d in expected]
    for ours, other in zip(expected, found, strict=True):
        for side in ("student", "teacher"):
            a, b = getattr(ours, side), getattr(other, side)
            assert np.array_equal(a.input_ids, b.input_ids)
            assert np.array_equal(a.byte_offsets, b.byte_offsets)
        mapped = ours.teacher_spans[:, 1] > ours.teacher_spans[:, 0]
        width = other.teacher_spans[:, 1] - other.teacher_spans[:, 0]
        assert np.array_equal(width > 0, mapped)
        assert np.array_equal(ours.teacher_spans[mapped], other.teacher_spans[mapped])
        assert (ours.num_text_bytes, ours.text_sha256) == (other.num_text_bytes, other.text_sha256)


def test_stock_webdataset_with_the_documented_lines(dataset):
    urls = [str(dataset.folder / record.file) for record in dataset.manifest.shards]
    code = documented_code("webdataset.WebDataset(urls")
    assert len(code.strip().splitlines()) == 3
    names = {"urls": urls}
    exec(code, names)
    check_documents(list(names["documents"]), dataset.documents)


def test_our_webdataset_pipeline(dataset):
    samples = list(decoded_documents(str(dataset.folder)))
    check_documents([sample["document"] for sample in samples], dataset.documents)
    for sample in samples:
        assert sample["__key__"] == document_key(sample["document"].document_id)
    shuffled = [sample["__url__"] for sample in decoded_documents(str(dataset.folder), seed=1)]
    assert shuffled != [sample["__url__"] for sample in samples]
    assert sorted(shuffled) == sorted(sample["__url__"] for sample in samples)


def test_our_webdataset_pipeline_over_nodes_and_workers(dataset, monkeypatch):
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        documents = decoded_documents(str(dataset.folder)).compose(webdataset.shuffle(10))
        loader = torch.utils.data.DataLoader(documents, batch_size=None, num_workers=2)
        own = [sample["document"] for sample in loader]
        assert 0 < len(own) < 25
        found += own
    check_documents(found, dataset.documents)


def damage(dataset, how):
    """Damage the second shard."""
    path = dataset.folder / dataset.manifest.shards[1].file
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        members = [member.offset for member in tar]
    assert len(members) == 5
    if how == "cut between members":
        del data[members[3] :]
    elif how == "header byte":
        data[members[3] + 150] ^= 1
    elif how == "payload byte":
        data[members[3] + 512 + 400] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("how", "error"),
    [("cut between members", DamagedShardError), ("payload byte", DamagedSampleError)],
)
def test_our_webdataset_pipeline_raises_on_damage(dataset, how, error):
    path = damage(dataset, how)
    with pytest.raises(error, match=path.name):
        list(decoded_documents(str(dataset.folder)))


def test_stock_webdataset_swallows_what_ours_raises(dataset):
    """The reason for our own pipeline; if this fails, webdataset has learned to tell."""
    path = damage(dataset, "cut between members")
    assert len(list(webdataset.WebDataset([str(path)], shardshuffle=False))) == 3


def test_a_damaged_tar_header_costs_our_pipeline_nothing(dataset):
    damage(dataset, "header byte")
    samples = list(decoded_documents(str(dataset.folder)))
    check_documents([sample["document"] for sample in samples], dataset.documents)


def test_a_missing_shard_is_named(dataset):
    path = dataset.folder / dataset.manifest.shards[4].file
    path.unlink()
    with pytest.raises(DamagedShardError, match=f"{path.name} is missing"):
        list(decoded_documents(str(dataset.folder)))


@pytest.mark.slow
def test_energon_with_the_documented_task_encoder(dataset):
    energon = pytest.importorskip("megatron.energon", reason="pip install megatron-energon")
    command = re.search(r"\$ energon (prepare .*) OUTPUT", DOCS.read_text()).group(1).split()
    program = Path(sys.executable).parent / "energon"
    subprocess.run([program, *command, dataset.folder], check=True, timeout=120)
    names = {}
    exec(documented_code("class AlignedDocuments"), names)
    rows = energon.get_train_dataset(
        str(dataset.folder),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=energon.WorkerConfig.default_worker_config(num_workers=0),
        task_encoder=names["AlignedDocuments"](),
        repeat=False,
    )
    found = [document for batch in energon.get_loader(rows) for document in batch]
    check_documents(found, dataset.documents)
