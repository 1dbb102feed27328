"""Object stores that run on this machine, and the align job run against them in a process."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem

from tests.support.corpus import NOT_COMPARED
from tests.support.servers import free_port, require_program, serve

ENVIRONMENTS = Path(sys.prefix) / "services"
BUCKET = "vocag"
SHARD_BYTES = 1 << 19  # some shards of a small corpus: every object costs several requests
RUN_SECONDS = 600
SET_UP = "`make test-services` sets up what these tests need"

CREDENTIALS = {
    "type": "authorized_user",
    "client_id": "test",
    "client_secret": "test",
    "refresh_token": "test",
    "token": "test",
    "expiry": "2099-01-01T00:00:00Z",
}
"""A token that nobody looks at: without any, Beam tries to get one for a minute a process."""

_COMMANDS = """
import contextlib, importlib, io, json, sys
for line in sys.stdin:
    module, *arguments = json.loads(line)
    told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(told[0]), contextlib.redirect_stderr(told[1]):
        try:
            status = importlib.import_module(module).main(arguments)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status or 0, *(text.getvalue() for text in told)]), flush=True)
"""

_NO_CACHE: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}


@dataclass(frozen=True)
class Session:
    """A process that reads a command a line, and writes what came of it."""

    process: "subprocess.Popen[str]"

    def run(self, module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = [module, *map(str, arguments)]
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"{command}: the process ended with {self.process.wait()}"
        return subprocess.CompletedProcess(command, *json.loads(answer))


@dataclass(frozen=True)
class ObjectStore:
    """An emulator that is running; `url` is its only bucket."""

    url: str
    environment: Mapping[str, str]  # of every process that uses it
    files: AbstractFileSystem  # a client that isn't Beam's

    def upload(self, folder: Path, name: str) -> str:
        """Copy a folder's files; return its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                url = f"{self.url}/{name}/{path.relative_to(folder).as_posix()}"
                self.files.pipe_file(url, path.read_bytes())
        return f"{self.url}/{name}"

    def read(self, url: str) -> bytes:
        data: bytes = self.files.cat_file(url)
        return data

    def list(self, url: str) -> list[str]:
        """Return the names of all objects below a URL, relative to it."""
        root = url.split("://")[1] + "/"
        return sorted(name.removeprefix(root) for name in self.files.find(url))

    def digests(self, url: str) -> dict[str, str]:
        """Return the SHA-256 of each object of a dataset, as `corpus.digests` does of files."""
        return {
            name: sha256(self.read(f"{url}/{name}")).hexdigest()
            for name in self.list(url)
            if name.rpartition("/")[2] not in NOT_COMPARED
        }

    @contextlib.contextmanager
    def session(self) -> Iterator["Session"]:
        """Run commands against the store one after another in one process, which starts once."""
        with (
            tempfile.TemporaryFile() as log,
            subprocess.Popen(
                [sys.executable, "-c", _COMMANDS],
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            yield Session(process)

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run Python against the store."""
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_SECONDS,
        )


@contextlib.contextmanager
def google_storage() -> Iterator[ObjectStore]:
    """Run gcp-storage-emulator with one empty bucket."""
    client = pytest.importorskip("gcsfs.core", reason=f"gcsfs is not installed: {SET_UP}")
    port = free_port()
    command = [
        _executable("gcs", "gcp-storage-emulator"), "start", "--host=localhost", f"--port={port}",
        "--in-memory", f"--default-bucket={BUCKET}",
    ]  # fmt: skip
    endpoint = f"http://localhost:{port}"
    environment = {
        "STORAGE_EMULATOR_HOST": endpoint,
        "GOOGLE_CLOUD_PROJECT": "vocag-test",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # gRPC, which the emulator lacks
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as credentials, serve(command, port):
        json.dump(CREDENTIALS, credentials)
        credentials.flush()
        environment["GOOGLE_APPLICATION_CREDENTIALS"] = credentials.name
        files = client.GCSFileSystem(endpoint_url=endpoint, token="anon", **_NO_CACHE)
        yield ObjectStore(f"gs://{BUCKET}", environment, files)


@contextlib.contextmanager
def amazon_s3() -> Iterator[ObjectStore]:
    """Run moto's server with one empty bucket."""
    client = pytest.importorskip("s3fs", reason=f"s3fs is not installed: {SET_UP}")
    port = free_port()
    endpoint = f"http://localhost:{port}"
    environment = {
        "AWS_ENDPOINT_URL": endpoint,  # Beam's --s3_endpoint_url does not reach worker processes
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with serve([_executable("s3", "moto_server"), "-p", str(port)], port):
        files = client.S3FileSystem(endpoint_url=endpoint, key="test", secret="test", **_NO_CACHE)
        files.mkdir(BUCKET)
        yield ObjectStore(f"s3://{BUCKET}", environment, files)


def _executable(environment: str, name: str) -> Path:
    return require_program(ENVIRONMENTS / environment / "bin" / name, SET_UP)
