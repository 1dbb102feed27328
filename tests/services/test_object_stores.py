"""The align job from bucket to bucket gives the bytes of a local run."""

import signal
from pathlib import Path

import pytest

from tests.services.stores import SHARD_BYTES, ObjectStore
from tests.support.corpus import MAX_DOCUMENT_BYTES, PATTERN, STUDENT, TEACHER, digests

pytestmark = pytest.mark.services

TWO_PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")

KILLED_AT_PUBLISHING = """
import os, signal, sys
from beam_jobs import storage
original, calls = storage.publish, []
def die(*arguments, **keywords):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **keywords)
storage.publish = die
from beam_jobs.align.command import main
sys.exit(main(sys.argv[1:]))
"""

DELETE = """
import sys
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions
from beam_jobs import storage
FileSystems.set_options(PipelineOptions([]))
storage.delete_files(sys.argv[1], sys.argv[2:])
"""


def arguments(corpus: str, *beam: str) -> list[str]:
    return [
        f"--input={corpus}/{PATTERN}", f"--output={corpus}/aligned", f"--student={STUDENT}",
        f"--teacher={TEACHER}", f"--shard-bytes={SHARD_BYTES}",
        f"--max-document-bytes={MAX_DOCUMENT_BYTES}", "--max-dead-letters=1",
        "--runner=DirectRunner", *beam,
    ]  # fmt: skip


def test_a_run_in_an_object_store_gives_the_local_bytes_and_is_then_left_alone(
    store: ObjectStore, remote_corpus: tuple[str, Path]
) -> None:
    corpus, reference = remote_corpus
    run = ["-m", "beam_jobs.align", *arguments(corpus)]
    first = store.run(*run)
    assert first.returncode == 0, first.stderr
    assert store.digests(f"{corpus}/aligned") == digests(reference)
    assert sum(name.endswith(".tar") for name in digests(reference)) > 3
    assert b"<html" in store.read(f"{corpus}/aligned/report.html")
    again = store.run(*run)
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True)
    other = store.run(*run, "--keep-text")
    assert other.returncode == 2
    assert "keep_text is False there and True here" in other.stderr
    assert store.digests(f"{corpus}/aligned") == digests(reference)


def test_two_worker_processes_give_the_local_bytes(
    store: ObjectStore, remote_corpus: tuple[str, Path]
) -> None:
    corpus, reference = remote_corpus
    result = store.run("-m", "beam_jobs.align", *arguments(corpus, *TWO_PROCESSES))
    assert result.returncode == 0, result.stderr
    assert store.digests(f"{corpus}/aligned") == digests(reference)


def test_files_that_are_gone_keep_no_other_from_being_deleted(
    store: ObjectStore, remote_corpus: tuple[str, Path]
) -> None:
    folder = f"{remote_corpus[0]}/data [1]"
    for name in ("a", "b*", "stays"):
        store.files.pipe_file(f"{folder}/{name}", b"data")
    names = ["gone", "a", "gone, too", "b*"]
    result = store.run("-c", DELETE, folder, *names)
    assert result.returncode == 0, result.stderr
    assert store.list(folder) == ["stays"]


def test_a_killed_job_is_resumed_in_an_object_store(
    store: ObjectStore, remote_corpus: tuple[str, Path]
) -> None:
    corpus, reference = remote_corpus
    killed = store.run("-c", KILLED_AT_PUBLISHING, *arguments(corpus))
    assert killed.returncode == -signal.SIGKILL
    left = store.list(f"{corpus}/aligned")
    assert "manifest.json" not in left
    assert any("/commit-" in name for name in left)
    resumed = store.run("-m", "beam_jobs.align", *arguments(corpus))
    assert resumed.returncode == 0, resumed.stderr
    assert "parts were taken over" in resumed.stdout
    assert store.digests(f"{corpus}/aligned") == digests(reference)


def test_a_dataset_in_an_object_store_validates(
    store: ObjectStore, remote_corpus: tuple[str, Path]
) -> None:
    corpus, reference = remote_corpus
    dataset = store.upload(reference, f"{corpus.split('/')[-1]}/copy")
    result = store.run("-m", "pipeline.validate", dataset, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
