"""Several servers of one model: which to ask next, when to retry, and when to stop.

A request goes from server to server until `attempts` are spent, with growing waits. Servers must
prove that they are the same model after a failure, now and then, and before their answers are kept.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import orjson
from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    wait_exponential,
)

from pipeline.command_line.failures import printable
from pipeline.scoring.engines.completions import DisprovedError, NonsenseError
from pipeline.scoring.engines.deadline import Deadline
from pipeline.scoring.engines.engine_settings import ServedSettings
from pipeline.scoring.engines.interface import EngineError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the second attempt, and between any two at most; waits double."""

PROOF_INTERVAL = 256
"""Requests after which a server must prove again that it is what it was."""

_REMEDY = "Scored shards stay: check the servers and run the same command again"

# Asking again can't help: the request itself is refused.
_FINAL_STATUSES = (301, 308, 400, 401, 403, 413, 422)
_SHOWN = 200
_CONNECT_SECONDS = 30.0
_MOST_BYTES = 1 << 20  # of an answer that isn't about a prompt


class PassingError(Exception):
    """A failure after which asking again, or another server, may help."""


@dataclass(eq=False)
class Endpoint:
    """One server, its URL without `/v1`.

    `num_failures` are in a row, `num_unproved` since its last periodic proof; `disproof` is why it
    gets no more requests.
    """

    url: str
    num_under_way: int = 0
    num_failures: int = 0
    num_unproved: int = 0
    rests_until: float = 0.0
    disproof: str = ""


class Endpoints:
    """The servers, asked from many threads.

    `prove` raises `DisprovedError` for a changed server; None trusts all.
    """

    def __init__(self, settings: ServedSettings, *, api_key: str = "") -> None:
        """Open no connection yet; EngineError for an invalid URL or key."""
        self.settings = settings
        self.servers = [Endpoint(base_url(url)) for url in settings.endpoint or ()]
        self.prove: Callable[[Endpoint], None] | None = None
        self._lock = threading.Lock()
        self._interrupted = threading.Event()
        wait = settings.answer_seconds
        if not api_key.isascii():
            raise EngineError("VOCAG_API_KEY has a letter beyond ASCII, which no server accepts")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(wait, connect=min(wait, _CONNECT_SECONDS)),
            # A connection for each request, so that its deadline is the connection's.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            # A compressed answer may unpack to a thousand times its size.
            headers={"Accept-Encoding": "identity", **headers},
        )

    def vouch(self, server: Endpoint) -> bool:
        """Whether a server proves itself now, so its answers can be kept."""
        assert self.prove is not None
        if not server.disproof:
            try:
                self.retry(self.prove, server)
            except EngineError as error:
                server.disproof = str(error)
        return not server.disproof

    def interrupt(self) -> None:
        """Start no request until `resume`; waiting retries end with `EngineError`."""
        self._interrupted.set()

    def resume(self) -> None:
        """Let requests start."""
        self._interrupted.clear()

    def retry(self, ask: Callable[[Endpoint], Answer], only: Endpoint | None = None) -> Answer:
        """Ask servers, or one `only`, until one has answered sensibly.

        `ask` raises `PassingError` or `NonsenseError` to be asked again, `DisprovedError` to drop a
        server. EngineError if that ends without an answer.
        """
        last = only
        attempts = Retrying(
            stop=stop_after_attempt(self.settings.attempts),
            wait=wait_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
            sleep=sleep_using_event(self._interrupted),
            retry=retry_if_exception_type((PassingError, NonsenseError)),
            reraise=True,
        )
        try:
            for attempt in attempts:
                with attempt:
                    last = only or self._choose(last)
                    return self._ask(last, ask, is_only=only is not None)
        except (PassingError, NonsenseError) as error:
            assert last is not None
            asked = [only] if only else self.servers
            raise EngineError(
                f"{last.url} gave no usable answer in {self.settings.attempts} attempts "
                f"at {', '.join(server.url for server in asked)}; the last one: {error}. {_REMEDY}"
            ) from error
        raise AssertionError("tenacity ends by a value or an error")

    def _ask(self, server: Endpoint, ask: Callable[[Endpoint], Answer], *, is_only: bool) -> Answer:
        if self._interrupted.is_set():
            raise EngineError("the job was ended before all its requests were answered")
        with self._lock:
            server.num_under_way += 1
            server.num_unproved += 1
            is_time = server.num_unproved > PROOF_INTERVAL
            if is_time:  # this thread alone asks for the proof
                server.num_unproved = 0
        try:
            # A server that failed may have come back as another model, and any may go wrong.
            if (is_time or server.num_failures) and self.prove is not None:
                self.prove(server)
            server.num_failures = 0
            return ask(server)
        except DisprovedError as error:
            server.disproof = str(error)
            if is_only:
                raise
            logger.warning("%s gets no more requests: %s", server.url, error)
            raise PassingError(str(error)) from error
        except (PassingError, NonsenseError):
            with self._lock:
                server.num_failures += 1
                rest = FIRST_WAIT * 2 ** min(server.num_failures, 20)
                server.rests_until = time.monotonic() + min(LONGEST_WAIT, rest)
            raise
        finally:
            with self._lock:
                server.num_under_way -= 1

    def _choose(self, last: Endpoint | None) -> Endpoint:
        """Return the least busy server, preferably not one that just failed."""
        left = [server for server in self.servers if not server.disproof]
        if not left:
            reasons = "; ".join(f"{server.url}: {server.disproof}" for server in self.servers)
            raise EngineError(f"no server is left to ask ({reasons}). {_REMEDY}")
        with self._lock:
            now = time.monotonic()
            return min(left, key=lambda s: (s.rests_until > now, s is last, s.num_under_way))

    def send(
        self,
        server: Endpoint,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        most_bytes: int = _MOST_BYTES,
    ) -> Any:
        """Return a server's answer, or the content of a path; one attempt.

        PassingError if asking again may help, EngineError if it can't; NonsenseError if the answer
        isn't JSON, is too long, or the path doesn't exist. Without `body`, None means no such path.
        """
        status, answer = self._receive(server.url + path, body, most_bytes)
        if status in (404, 405):
            if body is None:
                return None
            raise NonsenseError(f"{server.url}{path} is not there ({status}{_explain(answer)})")
        if status in _FINAL_STATUSES:
            remedy = ""
            if status in (401, 403):
                remedy = "; set VOCAG_API_KEY to a key that it accepts"
            elif status in (301, 308):
                remedy = "; name the address that it redirects to"
            raise EngineError(
                f"{server.url}{path} refuses the request with status {status}"
                f"{_explain(answer)}{remedy}"
            )
        if status != 200:
            raise PassingError(f"status {status}{_explain(answer)}")
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise NonsenseError(f"not JSON ({error})") from error

    def _receive(
        self, url: str, body: Mapping[str, Any] | None, most_bytes: int
    ) -> tuple[int, bytes]:
        seconds, method = self.settings.answer_seconds, "GET" if body is None else "POST"
        with Deadline(seconds) as deadline:
            traced = {"trace": deadline.trace}
            try:
                with self._client.stream(method, url, json=body, extensions=traced) as response:
                    return response.status_code, _read(response, most_bytes)
            except httpx2.TransportError as error:
                if deadline.is_over:
                    raise PassingError(f"no whole answer within {seconds:g} s") from error
                raise PassingError(printable(f"{type(error).__name__}: {error}")) from error


def _read(response: httpx2.Response, most_bytes: int) -> bytes:
    packing, answer = response.headers.get("Content-Encoding", "identity"), bytearray()
    if packing != "identity":
        raise NonsenseError(f"packed as {packing[:_SHOWN]!r}, which wasn't asked for")
    for part in response.iter_raw():
        answer += part
        if len(answer) > most_bytes:
            raise NonsenseError(f"more than the {most_bytes} bytes that it may have")
    return bytes(answer)


def base_url(url: str) -> str:
    """Return a server's URL without `/v1`; EngineError if it is invalid."""
    try:
        parts, _ = urlsplit(url), httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL) as error:
        raise EngineError(
            f"endpoint={printable(url)} isn't a URL such as http://localhost:8000 ({error})"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EngineError(f"endpoint={url} isn't a URL such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _explain(answer: bytes) -> str:
    """Return a server's error message, without the text that it repeats."""
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return ""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str):
        return ""
    # later lines repeat the request, and so the document
    return printable(f": {message.partition('\n')[0].partition('input')[0].strip()[:_SHOWN]}")
