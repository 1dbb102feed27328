import gc
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import fsspec
import pytest
from apache_beam.io.aws.s3io import S3IO
from apache_beam.io.filesystem import FileMetadata
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
def test_a_shard_is_written_whatever_becomes_of_advice(
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


def test_a_file_that_goes_while_its_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two teachers may score one dataset: the first that ends removes its lock there."""
    (tmp_path / "a.tar").write_bytes(b"four")
    lock = tmp_path / ".vocag-scores.lock"
    lock.touch()
    scan = os.scandir

    def scan_before(path: str) -> list[os.DirEntry[str]]:
        entries = list(scan(path))
        lock.unlink()
        return entries

    monkeypatch.setattr(os, "scandir", scan_before)
    assert storage.list_folder(str(tmp_path)) == {"a.tar": 4}


def test_the_users_folder_is_what_readers_take_it_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave `--output=~/aligned` as it is: the job made a folder named ~."""
    monkeypatch.setenv("HOME", "/home/user")
    location = "~/aligned"
    assert storage.absolute(location) == fsspec.core.url_to_fs(location)[1] == "/home/user/aligned"


def test_a_store_without_its_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "_answered", set())
    monkeypatch.setitem(sys.modules, "aiohttp", None)  # as if it weren't installed
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    with pytest.raises(NoAnswerError, match=r"https://a\.org can't be used: .*aiohttp.*\[http\]"):
        first_contact.require_answer("https://a.org/aligned/manifest.json")


@pytest.mark.parametrize("url", ["gs://bucket/corpus/*.jsonl", "s3://bucket/corpus/*.jsonl"])
def test_a_store_that_never_answers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket on this machine that listens and says nothing, in the place of each store."""
    pytest.importorskip("boto3" if url.startswith("s3") else "google.cloud.storage")
    monkeypatch.setattr(fsspec, "get_filesystem_class", str)  # not what is asked here
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


class OneBucket:
    """What Beam's S3 client asks of boto: objects by parts, none of which S3 refuses."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.objects: dict[str, bytes] = {}

    def create_multipart_upload(self, _: Any) -> Any:
        return SimpleNamespace(upload_id="u")

    def upload_part(self, request: Any) -> Any:
        self.parts.append(bytes(request.bytes))
        return SimpleNamespace(etag="e", part_number=request.part_number)

    def complete_multipart_upload(self, request: Any) -> None:
        assert request.parts, "MalformedXML"
        self.objects[request.object] = b"".join(self.parts)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> OneBucket:
    client = OneBucket()

    def create(path: str, **_: Any) -> BinaryIO:
        file: BinaryIO = S3IO(client).open(path, "wb")
        return file

    monkeypatch.setattr(FileSystems, "create", create)
    return client


@pytest.mark.parametrize("size", [0, 1, 6 << 20])
def test_an_object_of_s3_may_be_empty(bucket: OneBucket, size: int) -> None:
    storage.write_atomically("s3://bucket/letters.jsonl", b"x" * size, scratch="")
    assert bucket.objects == {"letters.jsonl": b"x" * size}


@pytest.mark.parametrize("written", [b"", b"half", b"x" * (6 << 20)])
def test_an_object_of_s3_whose_writer_fails_is_not_there(bucket: OneBucket, written: bytes) -> None:
    def write() -> None:
        with storage.open_to_write("s3://bucket/manifest.json") as file:
            file.write(written)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    gc.collect()  # a file that nobody holds is closed
    assert bucket.objects == {}


def test_a_copy_that_a_store_refuses_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beam's client of S3 returns the error, and raises nothing."""
    error = RuntimeError("SlowDown")
    monkeypatch.setattr(FileSystems, "copy", lambda sources, to: [(sources[0], to[0], error)])
    monkeypatch.setattr(FileSystems, "exists", lambda _: True)
    store = SimpleNamespace(metadata=lambda path: FileMetadata(path, 7))
    monkeypatch.setattr(FileSystems, "get_filesystem", lambda _: store)
    with pytest.raises(OSError, match=r"s3://b/x could not be copied to s3://b/y: SlowDown"):
        storage.publish("s3://b/x", "s3://b/y", 7, scratch="")
    monkeypatch.setattr(FileSystems, "copy", lambda *_: None)  # as Google's does
    storage.publish("s3://b/x", "s3://b/y", 7, scratch="")


def test_an_object_that_is_not_there_is_a_file_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NotFoundError(Exception):
        code = 404

    def refuse(*_: Any, **__: Any) -> None:
        raise NotFoundError("404 GET https://…")

    monkeypatch.setattr(FileSystems, "open", refuse)
    with pytest.raises(FileNotFoundError, match=r"gs://b/ids\.txt"):
        storage.read_bytes("gs://b/ids.txt")
    monkeypatch.setattr(NotFoundError, "code", 403)
    with pytest.raises(NotFoundError):
        storage.read_bytes("gs://b/ids.txt")


@pytest.mark.parametrize("inside", ["", "/.vocag", "/.vocag/run"])
def test_a_file_where_a_folder_is_to_be_is_named_with_a_remedy(tmp_path: Path, inside: str) -> None:
    file = tmp_path / "corpus file"
    file.touch()
    with pytest.raises(NotADirectoryError, match=re.escape(f"{file} is a file")) as refused:
        storage.make_folder(f"{file}{inside}")
    assert refused.value.__notes__ == [f"hint: --output '{file}-2'"]
    storage.make_folder(f"{tmp_path}/a/b")
    storage.make_folder(f"{tmp_path}/a/b")
    assert (tmp_path / "a" / "b").is_dir()
