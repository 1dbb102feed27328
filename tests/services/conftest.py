"""One emulator of each kind for all tests that use it; every test has a folder of its own there."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_jobs.align.command import align
from tests.services.stores import SHARD_BYTES, ObjectStore, amazon_s3, google_storage
from tests.support.corpus import Corpus, align_options, write_corpus


@pytest.fixture(scope="session")
def gcs() -> Iterator[ObjectStore]:
    with google_storage() as store:
        yield store


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectStore]:
    with amazon_s3() as store:
        yield store


@pytest.fixture(params=["gcs", "s3"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    chosen: ObjectStore = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture(scope="session")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Path]:
    """A corpus with every kind of input and damage, and its dataset made in local folders."""
    folder = tmp_path_factory.mktemp("local")
    corpus = write_corpus(folder / "corpus")
    align(align_options(corpus, folder / "dataset", shard_bytes=SHARD_BYTES))
    return corpus, folder / "dataset"


@pytest.fixture
def remote_corpus(store: ObjectStore, local_run: tuple[Corpus, Path]) -> tuple[str, Path]:
    """A fresh folder in the store with the same corpus in it, and the local dataset."""
    corpus, reference = local_run
    return store.upload(corpus.folder, uuid.uuid4().hex), reference
