"""Workers of a Flink cluster read from object stores and write to them."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engines.flink_cluster import FlinkCluster, process_environment
from tests.engines.workload import Workload, align_arguments, finish, start
from tests.services.stores import ObjectStore, amazon_s3, google_storage
from tests.support.corpus import digests

pytestmark = pytest.mark.engines


@pytest.fixture(params=[google_storage, amazon_s3])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    emulator: Callable[[], AbstractContextManager[ObjectStore]] = request.param
    with emulator() as running:
        yield running


def test_flink_from_bucket_to_bucket_gives_the_local_bytes(
    flink: FlinkCluster, small: Workload, store: ObjectStore
) -> None:
    corpus = store.upload(Path(small.pattern).parent, uuid.uuid4().hex)
    beam = [*flink.options(), *process_environment(store.environment)]
    run = align_arguments(f"{corpus}/*.jsonl", f"{corpus}/aligned", *beam)
    finish(start(run, environment={**os.environ, **store.environment}))
    assert store.digests(f"{corpus}/aligned") == digests(small.dataset)
    assert not any(name.startswith(".vocag-") for name in store.list(f"{corpus}/aligned"))
