"""The jobs from bucket to bucket give the bytes of a local run."""

import uuid
from pathlib import Path

import pytest

from pipeline.command_line.commands import COMMANDS
from tests.services.stores import SHARD_BYTES, ObjectStore
from tests.support.corpus import Corpus, align_options, command_line, digests
from tests.support.scored_data import run_score, score_arguments, sidecars, write_world

pytestmark = pytest.mark.services

ALIGN, SCORE = COMMANDS["align"][0], COMMANDS["score"][0]
TWO_PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")

DELETE = """
import sys
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions
from beam_jobs import storage
FileSystems.set_options(PipelineOptions([]))
storage.delete_files(sys.argv[1], sys.argv[2:])
"""


def arguments(corpus: str, *beam: str) -> list[str]:
    output = f"{corpus}/aligned"
    return command_line(align_options(Corpus(corpus), output, *beam, shard_bytes=SHARD_BYTES))


def test_a_run_in_an_object_store_gives_the_local_bytes_and_is_then_left_alone(
    store: ObjectStore, remote_corpus: tuple[str, Path]
) -> None:
    corpus, reference = remote_corpus
    with store.session() as session:
        first = session.run(ALIGN, *arguments(corpus))
        assert first.returncode == 0, first.stderr
        assert store.digests(f"{corpus}/aligned") == digests(reference)
        assert sum(name.endswith(".tar") for name in digests(reference)) > 3
        assert b"<html" in store.read(f"{corpus}/aligned/report.html")
        again = session.run(ALIGN, *arguments(corpus))
        assert (again.returncode, "nothing to do" in again.stdout) == (0, True)
        other = session.run(ALIGN, *arguments(corpus), "--keep-text")
    assert other.returncode == 2
    assert "--keep-text is not given there and true here" in other.stderr
    assert store.digests(f"{corpus}/aligned") == digests(reference)


def test_two_worker_processes_give_the_local_bytes(
    store: ObjectStore, remote_corpus: tuple[str, Path]
) -> None:
    corpus, reference = remote_corpus
    result = store.run("-m", "beam_jobs.align", *arguments(corpus, *TWO_PROCESSES))
    assert result.returncode == 0, result.stderr
    assert store.digests(f"{corpus}/aligned") == digests(reference)


def test_files_that_are_gone_keep_no_other_from_being_deleted(store: ObjectStore) -> None:
    folder = f"{store.url}/{uuid.uuid4().hex}/data [1]"
    for name in ("a", "b*", "stays"):
        store.files.pipe_file(f"{folder}/{name}", b"data")
    result = store.run("-c", DELETE, folder, "gone", "a", "gone, too", "b*")
    assert result.returncode == 0, result.stderr
    assert store.list(folder) == ["stays"]


def test_scores_in_a_store_are_the_local_bytes(store: ObjectStore, tmp_path: Path) -> None:
    write_world(tmp_path)
    url = store.upload(tmp_path / "data", uuid.uuid4().hex)
    run_score(tmp_path)
    here = sidecars(tmp_path)
    assert len(here) > 1
    command = [url, *score_arguments(tmp_path)[1:]]
    with store.session() as session:
        first = session.run(SCORE, *command)
        assert first.returncode == 0, first.stdout + first.stderr
        there = [name for name in store.list(url) if "teacher-" in name.rpartition("/")[2]]
        assert {name: store.read(f"{url}/{name}") for name in there} == here
        again = session.run(SCORE, *command)
        assert (again.returncode, "nothing to do" in again.stdout) == (0, True), again.stdout
    assert not any(name.startswith(".vocag-") for name in store.list(url))
