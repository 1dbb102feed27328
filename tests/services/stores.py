"""Object stores that run on this machine, and the align job run against them in a process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem

from tests.support.servers import free_port, require_program, serve

ENVIRONMENTS = Path(sys.prefix) / "services"
BUCKET = "vocag"
SHARD_BYTES = 1 << 19  # some shards of a small corpus: every object costs several requests
RUN_SECONDS = 600
SET_UP = "`make test-services` sets up what these tests need"

_NO_CACHE: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}


@dataclass(frozen=True)
class ObjectStore:
    """An emulator that is running.

    Attributes:
        url: of its only bucket.
        environment: what every process that uses it needs.
        files: the store through fsspec, and so through another client than Beam's.
    """

    url: str
    environment: Mapping[str, str]
    files: AbstractFileSystem

    def upload(self, folder: Path, name: str) -> str:
        """Copy a folder's files; return its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                url = f"{self.url}/{name}/{path.relative_to(folder).as_posix()}"
                self.files.pipe_file(url, path.read_bytes())
        return f"{self.url}/{name}"

    def read(self, url: str) -> bytes:
        """Return an object."""
        data: bytes = self.files.cat_file(url)
        return data

    def list(self, url: str) -> list[str]:
        """Return the names of all objects below a URL, relative to it."""
        root = url.split("://")[1] + "/"
        return sorted(name.removeprefix(root) for name in self.files.find(url))

    def digests(self, url: str) -> dict[str, str]:
        """Return the SHA-256 of each object of a dataset, but for the report, which holds times."""
        return {
            name: sha256(self.read(f"{url}/{name}")).hexdigest()
            for name in self.list(url)
            if name not in ("report.html", "inputs.json")
        }

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
        "NO_GCE_CHECK": "true",  # google-auth would look for a metadata server
        "GOOGLE_CLOUD_PROJECT": "vocag-test",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # gRPC, which the emulator lacks
    }
    with serve(command, port):
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
