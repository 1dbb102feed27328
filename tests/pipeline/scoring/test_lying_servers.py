"""A server takes no longer than it may, no more memory than an answer needs, and no terminal."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from pipeline.scoring.engines.completions import NonsenseError, most_bytes, read_likeliest
from pipeline.scoring.engines.endpoints import Endpoint, Endpoints, PassingError
from pipeline.scoring.engines.engine_settings import ServedSettings
from pipeline.scoring.engines.handshake import shake_hands
from pipeline.scoring.engines.interface import EngineError
from schemas.distribution_rule import DistributionRule

OK = b"HTTP/1.1 200 OK\r\n"
ESCAPES = "\x1b]0;pwned\x07\x1b[31m"
RULE = DistributionRule(2, 1.0, 480, "uint8")


@contextmanager
def server(reply: Callable[[socket.socket], None]) -> Iterator[str]:
    """Let `reply` answer each request, whatever it is; yield the URL."""

    def serve() -> None:
        with suppress(OSError):  # the listener is closed, or a client
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = b""
            while not asked.endswith(b'{"prompt":[1]}'):  # else closing would reset it
                asked += connection.recv(1 << 20)
            reply(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def send(reply: Callable[[socket.socket], None], **more: Any) -> Any:
    with server(reply) as url:
        endpoints = Endpoints(ServedSettings((url,), "served", answer_seconds=0.5))
        return endpoints.send(Endpoint(url), "/v1/completions", {"prompt": [1]}, **more)


def whole(body: bytes, *headers: bytes) -> Callable[[socket.socket], None]:
    told = b"\r\n".join([*headers, b"Content-Length: %d" % len(body)])
    return lambda connection: connection.sendall(OK + told + b"\r\n\r\n" + body)


def drip(first: bytes, each: bytes) -> Callable[[socket.socket], None]:
    """Send a little again and again, sooner than any time-out between two bytes."""

    def reply(connection: socket.socket) -> None:
        connection.sendall(first)
        ended = threading.Event()
        while not ended.wait(0.05):
            connection.sendall(each)

    return reply


def test_an_answer_in_time_is_what_it_is() -> None:
    assert send(whole(b'{"a": 1}')) == {"a": 1}


@pytest.mark.parametrize(
    ("first", "each"),
    [
        (OK + b"Content-Length: 100000\r\n\r\n", b" "),
        (OK, b"X: y\r\n"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_an_answer_ends_in_time_however_often_something_comes(first: bytes, each: bytes) -> None:
    started = time.monotonic()
    with pytest.raises(PassingError, match=r"^no whole answer within 0\.5 s$"):
        send(drip(first, each))
    assert time.monotonic() - started < 30, "else it would never have ended"


def test_an_answer_has_no_more_bytes_than_its_tokens_take() -> None:
    most = most_bytes(range(9), None)
    body = b"[" + b" " * (most - 2) + b"]"
    assert send(whole(body), most_bytes=most) == []
    with pytest.raises(NonsenseError, match=f"more than the {most} bytes that it may have"):
        send(whole(body + b" "), most_bytes=most)
    # What vLLM sends of a token that spells a line of 64 control characters.
    token = {"123456": {"logprob": -12.345678901234567, "rank": 123456, "decoded_token": "\0" * 64}}
    assert len(json.dumps(token)) < most_bytes(range(1), None) - most_bytes(range(0), None)
    assert most_bytes(range(9), RULE) > most


def test_a_packed_answer_is_not_unpacked() -> None:
    with pytest.raises(NonsenseError, match=r"packed as 'gzip', which wasn't asked for"):
        send(whole(gzip.compress(b"[]"), b"Content-Encoding: gzip"))


@pytest.mark.parametrize("status", [b"400", b"404", b"503"])
def test_what_a_server_says_of_a_failure_is_safe_to_print(status: bytes) -> None:
    body = json.dumps({"error": {"message": ESCAPES + "x" * 9000}}).encode()
    told = b"HTTP/1.1 %s Odd\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    with pytest.raises((EngineError, NonsenseError, PassingError)) as refused:
        send(lambda connection: connection.sendall(told + body))
    assert r"\x1b]0;pwned\x07\x1b[31mxxx" in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_an_address_that_has_moved_is_asked_once() -> None:
    head = b"HTTP/1.1 308 Permanent Redirect\r\nContent-Length: 0\r\nLocation: https://gpu/\r\n\r\n"
    with pytest.raises(EngineError, match=r"status 308; name the address that it redirects to"):
        send(lambda connection: connection.sendall(head))


@pytest.mark.parametrize("name", ["abc", " the", "-5", "1.5", "09", "٥", "9" * 5000, "1_0", ""])
@pytest.mark.parametrize("after", [False, True])
def test_tokens_are_named_by_id(name: str, after: bool) -> None:
    place = {"9": {"logprob": -2.0}, "7": {"logprob": -1.0}}
    following = {"token_id:3": -1.0, "token_id:4": -2.0}
    if after:
        following[f"token_id:{name}"] = -9.0
    else:
        place[name] = {"logprob": -9.0}
    choice = {"prompt_logprobs": [None, place], "logprobs": {"top_logprobs": [following]}}
    with pytest.raises(NonsenseError, match=r"a token is named '.{0,40}', not by its id"):
        read_likeliest({"choices": [choice]}, [5, 9], RULE)


def test_rows_of_a_padded_output_layer_are_no_tokens() -> None:
    """The first of them has the id `vocab_size`."""
    last, first_row = RULE.vocab_size - 1, RULE.vocab_size
    place = {str(last): {"logprob": -2.0}, str(first_row): {"logprob": -1.0}}
    following = {f"token_id:{first_row}": -1.0, f"token_id:{last}": -2.0}
    choice = {"prompt_logprobs": [None, place], "logprobs": {"top_logprobs": [following]}}
    ids, log_probs = read_likeliest({"choices": [choice]}, [5, last], RULE)
    assert ids.tolist() == [[last, -1]] * 2
    assert log_probs.tolist() == [[-2.0, -float("inf")]] * 2


@pytest.mark.parametrize(
    ("models", "version", "message"),
    [
        (["served"], ESCAPES, r"says that its version is '\\x1b\]0;pwned"),
        (["served"], "1.0\n<script>", r"says that its version is '1\.0\\n<script>'"),
        ([ESCAPES, *map(str, range(99))], "1.0", r"serves '\\x1b\]0;.*, and 80 more, not \"served"),
    ],
)
def test_what_a_server_says_of_itself_is_checked(
    models: list[str], version: str, message: str
) -> None:
    found = {
        "/v1/models": {"data": [{"id": name} for name in models]},
        "/version": {"version": version},
        "/v1/completions": {
            "choices": [{"prompt_logprobs": [None, {"9": {"logprob": -2.0}}]}],
        },
    }

    class Answers(Endpoints):
        def send(self, server: Endpoint, path: str, *_: Any, **__: Any) -> Any:
            return found[path]

    endpoints = Answers(ServedSettings(("http://a",), "served"))
    with pytest.raises(EngineError, match=message) as refused:
        shake_hands(endpoints, endpoints.servers[0], [5, 9], length=64, rule=None)
    assert str(refused.value).isprintable()
