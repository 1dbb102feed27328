"""Losses that are scored and stored in an object store: the bytes of a local folder's."""

import uuid
from pathlib import Path

import pytest

from schemas.view_file import Side
from tests.services.stores import ObjectStore
from tests.support.scored_data import run_score, score_arguments, sidecars, write_viewed_world
from vocag_cli import COMMANDS

pytestmark = pytest.mark.services


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_scores_in_a_store_are_the_local_bytes_through_a_view_too(
    store: ObjectStore, tmp_path: Path, side: Side
) -> None:
    write_viewed_world(tmp_path, side)
    url = store.upload(tmp_path / "data", uuid.uuid4().hex)
    # Without a teacher's view its tokens are another vocabulary's.
    views = [["--view", "other"]] if side == "teacher" else [[], ["--view", "other"]]
    with store.session() as session:
        for view in views:
            run_score(tmp_path, *view)
            arguments = [url, *score_arguments(tmp_path, *view)[1:]]
            first = session.run(COMMANDS["score"][0], *arguments)
            assert first.returncode == 0, first.stdout + first.stderr
            here = sidecars(tmp_path)
            there = [name for name in store.list(url) if "teacher-" in name.rpartition("/")[2]]
            assert {name: store.read(f"{url}/{name}") for name in there} == here
            again = session.run(COMMANDS["score"][0], *arguments)
            assert (again.returncode, "nothing to do" in again.stdout) == (0, True), again.stdout
    assert len(here) > len(views)
    assert not any(name.startswith(".vocag-") for name in store.list(url))
