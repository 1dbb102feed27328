import os
import socket
from pathlib import Path

import pytest
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs import storage
from beam_jobs.storage import open_shard_to_write
from pipeline.remote import first_contact
from pipeline.remote.first_contact import NoAnswerError

PARTS = [b"small", b"x" * (3 << 20), b"", b"end"]


def refuse(*_: int) -> None:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("advice", ["taken", "refused", "unknown"])
def test_a_shard_holds_what_was_written_whatever_becomes_of_the_advice(
    advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if advice == "refused":
        monkeypatch.setattr(os, "posix_fadvise", refuse)
    elif advice == "unknown":  # macOS
        monkeypatch.delattr(os, "posix_fadvise")
    path = tmp_path / "a.tar"
    with open_shard_to_write(str(path)) as file:
        for part in PARTS:
            file.write(part)
    assert path.read_bytes() == b"".join(PARTS)


@pytest.mark.parametrize("url", ["gs://bucket/corpus/*.jsonl", "s3://bucket/corpus/*.jsonl"])
def test_a_store_that_never_answers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket on this machine that listens and says nothing, in the place of each store."""
    pytest.importorskip("boto3" if url.startswith("s3") else "google.cloud.storage")
    assert first_contact.FIRST_ANSWER_SECONDS < 10
    monkeypatch.setattr(first_contact, "FIRST_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(first_contact, "_answered", set())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL"):
            monkeypatch.setenv(name, host)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "none")
        FileSystems.set_options(PipelineOptions([]))
        with pytest.raises(NoAnswerError, match=r"^.{2}://bucket gave no answer within 0\.5 s"):
            storage.require_answer(url)


def test_nobody_is_asked_about_a_local_path(tmp_path: Path) -> None:
    for path in (str(tmp_path / "missing"), "-", "corpus/*.jsonl"):
        storage.require_answer(path)
