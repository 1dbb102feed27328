"""A small Dataflow service on this machine: takes a job over REST and runs what was staged for it.

It speaks as much of the v1b3 API as Beam's launcher asks for: create a job, look at it, list its
messages and metrics. A job's work is done by `tests/services/replay.py`, in a process that has the
staged files and nothing else of the launcher's.
"""

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JOB_ID = "2026-11-21_00_00_00-1"
Replay = Callable[[dict[str, Any]], subprocess.Popen[str]]


@dataclass
class FakeDataflow:
    """The service, for one job: how often the launcher looked at it, and what runs it."""

    replay: Replay
    url: str = ""  # Beam wants "localhost" in it
    job: dict[str, Any] = field(default_factory=dict)
    polls: int = 0
    worker: subprocess.Popen[str] | None = None

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        assert not self.job, "one job a test"
        self.job = {**job, "id": JOB_ID}
        self.worker = self.replay(self.job)
        return self.look()

    def look(self) -> dict[str, Any]:
        self.polls += 1
        return {**self.job, "currentState": self._state()}

    def _state(self) -> str:
        assert self.worker is not None
        code = self.worker.poll()
        if code is None:
            return "JOB_STATE_RUNNING"
        return "JOB_STATE_DONE" if code == 0 else "JOB_STATE_FAILED"


@contextlib.contextmanager
def serve_dataflow(replay: Replay) -> Iterator[FakeDataflow]:
    """Run the service until the block ends."""
    service = FakeDataflow(replay)
    server = ThreadingHTTPServer(("localhost", 0), _handler(service))
    service.url = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        if service.worker is not None:
            service.worker.kill()
            service.worker.communicate()


def _handler(service: FakeDataflow) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(service.create(json.loads(body)))

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path.endswith(f"/jobs/{JOB_ID}"):
                self._answer(service.look())
            elif path.endswith("/messages"):
                self._answer({"jobMessages": []})
            elif path.endswith("/metrics"):
                self._answer({"metrics": []})
            elif path.endswith("/jobs"):
                self._answer({"jobs": []})
            else:
                self.send_error(404)

        def _answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing: pytest shows what failed."""

    return Handler
