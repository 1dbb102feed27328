"""Our files in the hands of other readers, as docs/guides/readers.md shows them."""

import os
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pyarrow.parquet
import pytest
import torch.utils.data
import webdataset

from beam_jobs.report.card import CARD_FILE, render_card
from pipeline.dataset.webdataset_documents import decoded_documents
from schemas.document import decode_document, document_key
from schemas.errors import DamagedShardError
from tests.support.datasets import remove_documents
from tests.support.documents import assert_same
from tests.support.sample_encoder import encode_document
from tests.support.streaming_data import make_documents, write_dataset

DOCS = Path(__file__).parents[3] / "docs" / "guides" / "readers.md"


@pytest.fixture
def dataset(tmp_path):
    documents = make_documents([1 + 13 * number for number in range(25)])
    return write_dataset(tmp_path / "data", documents, shard_sizes=[5] * 5)


@pytest.fixture
def reduced(dataset):
    """Return the dataset less what was removed, of which its tars and indices still hold all."""
    gone = {"doc-0", "doc-17"}
    manifest = remove_documents(dataset.folder, *gone)
    left = [document for document in dataset.documents if document.document_id not in gone]
    return replace(dataset, manifest=manifest, documents=left)


def documented_code(marker, dataset, page=DOCS):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if marker in block]
    return block.replace("aligned", str(dataset.folder))


def count_tokens(dataset):
    return sum(len(document.student) for document in dataset.documents)


def check_documents(found, expected):
    written = {d.document_id: decode_document(encode_document(d)) for d in expected}
    assert sorted(document.document_id for document in found) == sorted(written)
    for document in found:
        assert_same(document, written[document.document_id])


def test_stock_webdataset_with_the_documented_lines(reduced):
    urls = [str(reduced.folder / record.file) for record in reduced.manifest.shards]
    names = {"urls": urls}
    exec(documented_code("webdataset.WebDataset(urls", reduced), names)
    check_documents(list(names["documents"]), reduced.documents)


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


def test_stock_webdataset_swallows_what_ours_raises(dataset):
    """The reason for our own pipeline; if this fails, webdataset has learned to tell."""
    path = dataset.folder / dataset.manifest.shards[1].file
    with tarfile.open(path) as tar:
        fourth = tar.getmembers()[3].offset
    path.write_bytes(path.read_bytes()[:fourth])
    with pytest.raises(DamagedShardError, match=path.name):
        list(decoded_documents(str(dataset.folder)))
    assert len(list(webdataset.WebDataset([str(path)], shardshuffle=False))) == 3


@pytest.mark.slow
def test_energon_with_the_documented_task_encoder(reduced):
    energon = pytest.importorskip("megatron.energon", reason="pip install megatron-energon")
    page = DOCS.read_text().replace("\\\n", " ")
    command = re.search(r"\$ energon (prepare .*) DATASET", page)[1].split()
    program = Path(sys.executable).parent / "energon"
    subprocess.run([program, *command, reduced.folder], check=True, timeout=120)
    names = {}
    exec(documented_code("class AlignedDocuments", reduced), names)
    rows = energon.get_train_dataset(
        str(reduced.folder),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=energon.WorkerConfig.default_worker_config(num_workers=0),
        task_encoder=names["AlignedDocuments"](),
        repeat=False,
    )
    found = [document for batch in energon.get_loader(rows) for document in batch]
    check_documents(found, reduced.documents)


@pytest.mark.parametrize("package", ["pandas", "duckdb", "polars"])
def test_the_index_in_tables(reduced, package):
    pytest.importorskip(package)
    names = {}
    exec(documented_code(f"import {package}\n", reduced), names)
    assert int(names["num_student_tokens"]) == count_tokens(reduced)


def test_documents_scores_in_tables(reduced):
    pytest.importorskip("duckdb")
    ids = [f"doc-{number}" for number in range(25)]
    table = pyarrow.table({"document_id": ids, "bits_per_byte": [1.0] * 25})
    name = "data-000000-of-000005.teacher-08e924cac34e2837.documents.parquet"
    pyarrow.parquet.write_table(table, reduced.folder / name)
    names = {}
    exec(documented_code("documents.parquet", reduced, DOCS.with_name("filter.md")), names)
    assert names["quantiles"] == [([1.0] * 3, len(reduced.documents))]


@pytest.mark.slow
def test_samples_in_datasets(reduced, tmp_path):
    decode = (
        "from schemas.document import decode_document\n"
        "decoded = [decode_document(row['safetensors']) for row in documents]\n"
        "print(len(decoded), sum(len(document.student) for document in decoded))"
    )
    found = run_apart(documented_code("import datasets\n", reduced) + decode, tmp_path)
    assert found == f"{len(reduced.documents)} {count_tokens(reduced)}"


@pytest.mark.slow
@pytest.mark.parametrize("has_card", [True, False])
def test_a_folder_in_datasets_is_its_indices(dataset, tmp_path, has_card):
    """Why the page warns: no error, and no tokens."""
    if has_card:
        (dataset.folder / CARD_FILE).write_text(render_card(dataset.manifest), "utf-8")
    code = (
        f"import datasets; found = datasets.load_dataset({str(dataset.folder)!r})['train']\n"
        "print(found.config_name, found.num_rows, found.column_names)"
    )
    config, num_rows, columns = run_apart(code, tmp_path).split(maxsplit=2)
    assert (config, int(num_rows)) == (
        "index" if has_card else "default",
        dataset.manifest.totals["num_documents"],
    )
    assert "cut_student" in columns
    assert "safetensors" not in columns


def run_apart(code, scratch):
    """Run code that imports Hugging Face's `datasets`: here that name is a module of the tests."""
    try:
        version("datasets")
    except PackageNotFoundError:
        pytest.skip("datasets is not installed")
    caches = {"HF_DATASETS_CACHE": str(scratch), "HF_HUB_OFFLINE": "1"}
    environment = os.environ | caches | {"PYTHONPATH": str(DOCS.parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=scratch, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
