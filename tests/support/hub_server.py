"""A small Hugging Face hub of datasets: what its own client asks of one, with faults to order."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.servers import answering

TOKEN = "hf_oNlyForThisTestNeverToBeShown"

Answer = tuple[int, "bytes | dict[str, Any] | list[Any]", dict[str, str]]


def blob_id(data: bytes) -> str:
    """Return what git calls a file's bytes."""
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class HubServer:
    """One hub.

    Attributes:
        commits: of each dataset, the newest last: its id and files.
        faults: statuses of the next requests of a kind, such as `{"GET /datasets": [503]}`.
        requests: method, path and range of each.
        url: for HF_ENDPOINT.
    """

    commits: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    faults: dict[str, list[int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def files(self, dataset: str, revision: str = "main") -> dict[str, bytes]:
        """Return a dataset's files at a commit, or at its newest."""
        found = self.commits[dataset]
        return found[-1][1] if revision == "main" else dict(found)[revision]

    def put(self, dataset: str, files: dict[str, bytes]) -> str:
        """Add a commit; return its id."""
        history = self.commits.setdefault(dataset, [])
        name = sha1(f"{dataset} {len(history)}".encode()).hexdigest()
        history.append((name, files))
        return name

    def answer(self, method: str, url: str, body: bytes, headers: Any) -> Answer:
        """Return status, body and headers."""
        path = urlsplit(url).path
        with self.lock:
            self.requests.append(" ".join(filter(None, (method, path, headers.get("Range")))))
            for start, statuses in self.faults.items():
                if f"{method} {path}".startswith(start) and statuses:
                    return statuses.pop(0), {"error": "as ordered"}, {}
            if headers.get("Authorization") != f"Bearer {TOKEN}":
                return 401, {"error": "who are you?"}, {}
            if path == "/api/validate-yaml":
                return 200, {"errors": [], "warnings": []}, {}
            if path == "/api/repos/create":
                given = json.loads(body)
                name = "/".join(filter(None, (given.get("organization"), given["name"])))
                self.commits.get(name) or self.put(name, {})
                return 200, {"url": f"{self.url}/datasets/{name}"}, {}
            parts = [unquote(part) for part in path.removeprefix("/api").split("/")[2:]]
            name, rest = "/".join(parts[:2]), parts[2:]
            if name not in self.commits:
                return 404, {"error": "no such"}, {"X-Error-Code": "RepoNotFound"}
            if path.startswith("/api"):
                return self._api(name, rest, body, "recursive=true" in url.lower())
            return self._resolve(name, rest[1], "/".join(rest[2:]), headers)

    def _api(self, name: str, rest: list[str], body: bytes, recursive: bool) -> Answer:
        what, revision, *path = rest if len(rest) > 1 else ("revision", "main")
        newest = self.commits[name][-1][0]
        if revision not in {"main", *dict(self.commits[name])}:
            return 404, {"error": "no such"}, {"X-Error-Code": "RevisionNotFound"}
        files, folder = self.files(name, revision), "".join(part + "/" for part in path)
        if what == "revision":
            siblings = [{"rfilename": file} for file in files]
            sha = newest if revision == "main" else revision
            return 200, {"id": name, "sha": sha, "siblings": siblings, "private": True}, {}
        if what == "tree":
            inside = {file: data for file, data in files.items() if file.startswith(folder)}
            return 200, list(_entries(inside, folder, recursive=recursive)), {}
        if what == "preupload":
            asked = json.loads(body)["files"]
            modes = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False,
                 "oid": blob_id(files[each["path"]]) if each["path"] in files else None}
                for each in asked
            ]  # fmt: skip
            return 200, {"files": modes}, {}
        assert what == "commit", what
        return self._commit(name, newest, [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, newest: str, lines: list[dict[str, Any]]) -> Answer:
        files = dict(self.files(name))
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", newest) != newest:
                return 412, {"error": "A commit has happened since."}, {}
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            assert line["key"] in ("header", "file"), line
        made = self.put(name, files)
        return (
            200,
            {"commitUrl": f"{self.url}/datasets/{name}/commit/{made}", "commitOid": made},
            {},
        )

    def _resolve(self, name: str, revision: str, file: str, headers: Any) -> Answer:
        data = self.files(name, revision).get(file)
        if data is None:
            return 404, {"error": "no such"}, {"X-Error-Code": "EntryNotFound"}
        commit = self.commits[name][-1][0] if revision == "main" else revision
        told = {"ETag": f'"{blob_id(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if "Range" not in headers:
            return 200, data, told
        start, _, last = headers["Range"].removeprefix("bytes=").partition("-")
        stop = min(int(last or len(data)) + 1, len(data))
        span = f"bytes {start}-{stop - 1}/{len(data)}"
        return 206, data[int(start) : stop], {**told, "Content-Range": span}


def _entries(files: dict[str, bytes], folder: str, *, recursive: bool) -> Iterator[dict[str, Any]]:
    folders = {}
    for file, data in files.items():
        first, slash, _ = file.removeprefix(folder).partition("/")
        if slash:
            folders[folder + first] = {"type": "directory", "path": folder + first, "oid": "0" * 40}
        if recursive or not slash:
            yield {"type": "file", "path": file, "size": len(data), "oid": blob_id(data)}
    yield from folders.values()


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    """Serve an empty hub until the block ends."""
    hub = HubServer()
    with answering(_handler_of(hub)) as port:
        hub.url = f"http://127.0.0.1:{port}"
        yield hub


def _handler_of(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, found, headers = hub.answer(self.command, self.path, body, self.headers)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler
