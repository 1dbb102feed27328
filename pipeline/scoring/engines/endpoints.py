"""Several servers of one model: which is asked next, when again, and when no more.

Every request is tried on one server after another until `attempts` are spent, with growing waits in
between. A server that has failed rests a while, and must prove that it is still the same model
before it is believed again. So must every server now and then, and before what it has answered is
kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import orjson
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_attempt,
    wait_exponential,
)

from pipeline.scoring.engines.completions import DisprovedError, NonsenseError
from pipeline.scoring.engines.interface import EngineError
from pipeline.scoring.engines.settings import ServedSettings

Answer = TypeVar("Answer")

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the second attempt, and between any two at most; waits double."""

PROOF_INTERVAL = 256
"""Answers after which a server must prove again that it is what it was."""

# What asking again can't help: the request itself is refused.
_FINAL_STATUSES = (400, 401, 403, 413, 422)
_SHOWN = 200


class PassingError(Exception):
    """A failure that asking again, or elsewhere, may help."""

    def __init__(self, message: str, *, wait_seconds: float = 0.0) -> None:
        """Hold what happened, and how long the server asked to wait."""
        super().__init__(message)
        self.wait_seconds = wait_seconds


@dataclass(eq=False)
class Endpoint:
    """One server.

    Attributes:
        url: without `/v1`.
        num_under_way: requests.
        num_failures: in a row.
        num_unproved: answers since it last proved itself.
        num_disproofs: how often it has failed to; answers from before one are void.
        rests_until: on the monotonic clock.
    """

    url: str
    num_under_way: int = 0
    num_failures: int = 0
    num_unproved: int = 0
    num_disproofs: int = 0
    rests_until: float = 0.0
    proof: threading.Lock = field(default_factory=threading.Lock)


class Endpoints:
    """The servers, asked from many threads.

    Attributes:
        settings: how they are asked.
        num_requests: sent so far.
        num_retries: of them, those that were asked again.
        prove: raises `DisprovedError` for a server that is another; None: all are believed.
    """

    def __init__(self, settings: ServedSettings, *, api_key: str = "") -> None:
        """Open no connection yet.

        Raises:
            EngineError: no URL of a server.
        """
        self.settings = settings
        self.num_requests = 0
        self.num_retries = 0
        self.servers = [Endpoint(base_url(url)) for url in settings.endpoint or ()]
        self.prove: Callable[[Endpoint], None] | None = None
        self._lock = threading.Lock()
        self._interrupted = threading.Event()
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(settings.answer_seconds, connect=30.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )

    def vouch(self, server: Endpoint) -> str:
        """Return why what a server has answered can't be kept, "" if it proves itself now."""
        assert self.prove is not None
        try:
            self.retry(self.prove, server)
        except EngineError as error:
            return str(error)
        server.num_unproved = 0
        return ""

    def interrupt(self) -> None:
        """Let no request start until `resume`; what waits to ask again ends with `EngineError`."""
        self._interrupted.set()

    def resume(self) -> None:
        """Let requests start."""
        self._interrupted.clear()

    def retry(self, ask: Callable[[Endpoint], Answer], only: Endpoint | None = None) -> Answer:
        """Ask servers until one has answered sensibly.

        Args:
            ask: a server; raises `PassingError` or `NonsenseError` where asking again may help.
            only: ask no other server, and this one no more if it is disproved.

        Raises:
            EngineError: the attempts are spent, or asking again is of no use.
        """
        last: Endpoint | None = None

        def may_help(error: BaseException) -> bool:
            if isinstance(error, DisprovedError):
                return only is None
            return isinstance(error, PassingError | NonsenseError)

        attempts = Retrying(
            stop=stop_after_attempt(self.settings.attempts),
            wait=self._wait,
            sleep=sleep_using_event(self._interrupted),
            retry=retry_if_exception(may_help),
            reraise=True,
        )
        try:
            for attempt in attempts:
                with attempt:
                    last = only or self._choose(last)
                    self._count(retried=attempt.retry_state.attempt_number > 1)
                    return self._ask(last, ask)
        except (PassingError, NonsenseError) as error:
            assert last is not None
            cause = str(error)
            if may_help(error):
                every = ", ".join(server.url for server in ([only] if only else self.servers))
                cause = (
                    f"{last.url} gave no usable answer in {self.settings.attempts} attempts at "
                    f"{every}; the last one: {error}"
                )
            raise EngineError(
                f"{cause}. Shards that are scored stay: look after the server and run the same "
                "command again"
            ) from error
        raise AssertionError("tenacity ends by a value or an error")

    def _ask(self, server: Endpoint, ask: Callable[[Endpoint], Answer]) -> Answer:
        with self._lock:
            server.num_under_way += 1
        try:
            self._require_proof(server)
            answer = ask(server)
            with self._lock:
                server.num_unproved += 1
            return answer
        except (PassingError, NonsenseError) as error:
            with self._lock:
                server.num_failures += 1
                server.num_disproofs += isinstance(error, DisprovedError)
                rest = FIRST_WAIT * 2 ** min(server.num_failures, 20)
                server.rests_until = time.monotonic() + min(LONGEST_WAIT, rest)
            raise
        finally:
            with self._lock:
                server.num_under_way -= 1

    def _require_proof(self, server: Endpoint) -> None:
        """Let a server prove itself if it is time; one thread asks, the others find it done."""

        def is_time() -> bool:
            return server.num_failures > 0 or server.num_unproved >= PROOF_INTERVAL

        if not is_time():
            return
        with server.proof:
            if is_time() and self.prove is not None:
                self.prove(server)
            server.num_failures = server.num_unproved = 0

    def _choose(self, last: Endpoint | None) -> Endpoint:
        """Return the least busy server, rather none that has just failed."""
        with self._lock:
            now = time.monotonic()
            return min(
                self.servers, key=lambda s: (s.rests_until > now, s is last, s.num_under_way)
            )

    def _count(self, *, retried: bool) -> None:
        if self._interrupted.is_set():
            raise EngineError("the job was ended before all its requests were answered")
        with self._lock:
            self.num_requests += 1
            self.num_retries += retried

    def _wait(self, state: RetryCallState) -> float:
        grown = wait_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT)(state)
        error = state.outcome.exception() if state.outcome else None
        asked = error.wait_seconds if isinstance(error, PassingError) else 0.0
        return max(float(grown), min(asked, LONGEST_WAIT))

    def send(self, server: Endpoint, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return what a server answers, or has under a path; one attempt.

        Args:
            server: to ask.
            path: such as "/version".
            body: of a question; without one, None is the answer of a server that has no such path.

        Raises:
            PassingError: asking again may help.
            NonsenseError: no JSON, or no such path; vLLM says the same of a model.
            EngineError: asking again can't help.
        """
        method = "GET" if body is None else "POST"
        try:
            response = self._client.request(method, server.url + path, json=body)
        except httpx2.TransportError as error:
            raise PassingError(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        if status in (404, 405):
            if body is None:
                return None
            raise NonsenseError(f"{server.url}{path} is not there ({status}{_explain(response)})")
        if status in _FINAL_STATUSES:
            key = "; set VOCAG_API_KEY to the key that it knows" if status in (401, 403) else ""
            raise EngineError(
                f"{server.url}{path} refuses the request with status {status}"
                f"{_explain(response)}{key}"
            )
        if status != 200:
            wait = response.headers.get("retry-after", "")
            raise PassingError(
                f"status {status}{_explain(response)}",
                wait_seconds=float(wait) if wait.isdecimal() else 0.0,
            )
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError as error:
            raise NonsenseError(f"no JSON ({error})") from error


def base_url(url: str) -> str:
    """Return a server's URL without the `/v1` that users copy along.

    Raises:
        EngineError: no http:// or https:// URL.

    Example:
        >>> base_url("http://gpu-7:8000/v1/")
        'http://gpu-7:8000'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EngineError(f"--endpoint {url} is no URL such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _explain(response: httpx2.Response) -> str:
    """Return what a server says went wrong; never its echo of the request, which holds text."""
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return ""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str):
        return ""
    # what follows the first line repeats the request, and so the document
    return f": {message.partition('\n')[0].partition('input')[0].strip()[:_SHOWN]}"
