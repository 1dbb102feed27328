"""Losses that are scored and stored in an object store: the bytes of a local folder's."""

import uuid
from pathlib import Path

import pytest

from tests.services.stores import ObjectStore
from tests.support.scored_data import run_score, score_arguments, sidecars, write_world
from vocag_cli import COMMANDS

pytestmark = pytest.mark.services


def test_scores_in_a_store_are_the_local_bytes(store: ObjectStore, tmp_path: Path) -> None:
    write_world(tmp_path)
    url = store.upload(tmp_path / "data", uuid.uuid4().hex)
    run_score(tmp_path)
    arguments = [url, *score_arguments(tmp_path)[1:]]
    with store.session() as session:
        first = session.run(COMMANDS["score"][0], *arguments)
        assert first.returncode == 0, first.stdout + first.stderr
        here = sidecars(tmp_path)
        there = [name for name in store.list(url) if "teacher-" in name.rpartition("/")[2]]
        assert {name: store.read(f"{url}/{name}") for name in there} == here
        again = session.run(COMMANDS["score"][0], *arguments)
        assert (again.returncode, "nothing to do" in again.stdout) == (0, True), again.stdout
    assert len(here) > 1
    assert not any(name.startswith(".vocag-") for name in store.list(url))
