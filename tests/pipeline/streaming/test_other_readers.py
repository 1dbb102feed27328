"""Other projects' readers on our files, as docs/streaming.md shows them; skipped where missing."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from beam_jobs.report.card import CARD_FILE, render_card
from pipeline.dataset.files import open_dataset
from schemas.manifest import Manifest
from tests.support.datasets import build_dataset

PAGE = Path(__file__).parents[3] / "docs" / "streaming.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    build_dataset(folder, num_shards=4)
    return folder


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    return open_dataset(folder).manifest


def example(package: str) -> str:
    """Return the example of the page that imports a package."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = [block for block in blocks if f"import {package}\n" in block]
    assert len(found) == 1, package
    return str(found[0])


def run(package: str, folder: Path) -> dict[str, Any]:
    """Run the page's example on a dataset; return the names that it leaves."""
    pytest.importorskip(package)
    code = example(package)
    assert "aligned" in code
    names: dict[str, Any] = {}
    exec(code.replace("aligned", str(folder)), names)
    return names


@pytest.mark.parametrize("package", ["pandas", "duckdb", "polars"])
def test_the_index_in_tables(package: str, folder: Path, manifest: Manifest) -> None:
    found = run(package, folder)["num_student_tokens"]
    assert int(found) == manifest.totals["num_student_tokens"]


@pytest.mark.slow
def test_samples_in_datasets(folder: Path, manifest: Manifest, tmp_path: Path) -> None:
    decode = (
        "from schemas.document import decode_document\n"
        "decoded = [decode_document(row['safetensors']) for row in documents]\n"
        "print(len(decoded), sum(len(document.student) for document in decoded))"
    )
    found = run_apart(example("datasets").replace("aligned", str(folder)) + decode, tmp_path)
    totals = manifest.totals
    assert found == f"{totals['num_documents']} {totals['num_student_tokens']}"


@pytest.mark.slow
@pytest.mark.parametrize("has_card", [True, False])
def test_a_folder_in_datasets_is_its_indices(
    folder: Path, manifest: Manifest, tmp_path: Path, has_card: bool
) -> None:
    """Why the page warns: no error, and no tokens."""
    own = tmp_path / "data"
    shutil.copytree(folder, own)
    if has_card:
        (own / CARD_FILE).write_text(render_card(manifest), "utf-8")
    code = (
        f"import datasets; found = datasets.load_dataset({str(own)!r})['train']\n"
        "print(found.config_name, found.num_rows, found.column_names)"
    )
    config, num_rows, columns = run_apart(code, tmp_path).split(maxsplit=2)
    assert (config, int(num_rows)) == (
        "index" if has_card else "default",
        manifest.totals["num_documents"],
    )
    assert "cut_student" in columns
    assert "safetensors" not in columns


def run_apart(code: str, scratch: Path) -> str:
    """Run code that imports Hugging Face's `datasets`: here that name is a module of the tests."""
    try:
        version("datasets")
    except PackageNotFoundError:
        pytest.skip("datasets is not installed")
    caches = {"HF_DATASETS_CACHE": str(scratch), "HF_HUB_OFFLINE": "1"}
    environment = os.environ | caches | {"PYTHONPATH": str(PAGE.parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=scratch, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
