"""A small server of the completions API around a model of transformers, with faults to order.

It speaks as vLLM does (`prompt_logprobs`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.servers import answering

MODEL = "served"
WRONG_BY = 3.0

Fault = Callable[[dict[str, Any]], "dict[str, Any] | int | None"]
"""Takes a good answer: another answer, a status, or None to hang up without one."""


def right(answer: dict[str, Any]) -> dict[str, Any]:
    return answer


def off(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer `WRONG_BY` nats off."""
    return _changed(answer, lambda value: value - WRONG_BY)


def zeros(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as if every token were certain."""
    return _changed(answer, lambda _: 0.0)


def constant(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as if every token were as likely as any other."""
    return _changed(answer, lambda _: -2.5)


def _changed(answer: dict[str, Any], change: Callable[[float], float]) -> dict[str, Any]:
    for place in answer["choices"][0]["prompt_logprobs"][1:]:
        for entry in place.values():
            entry["logprob"] = change(entry["logprob"])
    return answer


@dataclass
class CompletionsServer:
    """One server: its faults are for one completion each, the next first; `bodies` were asked."""

    model: torch.nn.Module
    faults: list[Fault] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    version: str = "0.20.2"
    max_model_len: int | None = 512
    max_logprobs: int = 20  # vLLM's default
    sampling: dict[str, float] = field(default_factory=dict)  # the model's generation_config.json
    is_stubborn: bool = False  # samples by it whatever a request says
    key: str = ""
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str) -> dict[str, Any] | int:
        if path == "/v1/models":
            entry = {"id": MODEL, "owned_by": "vllm", "max_model_len": self.max_model_len}
            return {"object": "list", "data": [entry]}
        return {"version": self.version} if path == "/version" else 404

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | int | None:
        if path != "/v1/completions" or body["model"] != MODEL:
            return 404
        if max(body["prompt_logprobs"], body.get("logprobs", 0)) > self.max_logprobs:
            return 400
        with self.lock:
            self.bodies.append(body)
            answer = self.complete(body)
            fault = self.faults.pop(0) if self.faults else None
        return answer if fault is None else fault(answer)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, top_k = body["prompt"], body["prompt_logprobs"]
        rows = self.log_probabilities(ids)
        own = []
        for token, values in zip(ids[1:], rows, strict=False):
            found = values.topk(top_k)  # vLLM: the prompt's own token first, then the likeliest
            tokens = dict.fromkeys([token, *found.indices.tolist()])
            own.append({str(each): {"logprob": float(values[each])} for each in tokens})
        choice: dict[str, Any] = {"index": 0, "text": "", "prompt_logprobs": [None, *own]}
        if "logprobs" in body:
            assert body["return_tokens_as_token_ids"], "texts of tokens aren't unique"
            last = self.processed(rows[-1], body)
            drawn = int(torch.multinomial(last.exp(), 1))
            tokens = dict.fromkeys([drawn, *last.topk(body["logprobs"]).indices.tolist()])
            after = {f"token_id:{each}": max(float(last[each]), -9999.0) for each in tokens}
            choice["logprobs"] = {"tokens": [f"token_id:{drawn}"], "top_logprobs": [after]}
        return {
            "model": MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": len(ids), "completion_tokens": 1},
        }

    def processed(self, values: torch.Tensor, body: dict[str, Any]) -> torch.Tensor:
        """Return what sampling makes of log-probabilities, as vLLM's `processed_logprobs`."""
        said = (
            {} if self.is_stubborn else {name: body[name] for name in self.sampling if name in body}
        )
        rules = {"temperature": 1.0, "top_k": -1} | self.sampling | said
        values = values / rules["temperature"]
        if rules["top_k"] > 0:
            values = values.where(values >= values.topk(int(rules["top_k"])).values[-1], -torch.inf)
        return values.log_softmax(-1)

    @torch.inference_mode()
    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """Return what follows each place, [T, V]."""
        return self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


@contextmanager
def serve(folder: Path, **options: Any) -> Iterator[CompletionsServer]:
    """Serve the model in a folder on a free port until the block ends."""
    server = CompletionsServer(AutoModelForCausalLM.from_pretrained(folder).eval(), **options)
    with listen(server):
        yield server


@contextmanager
def listen(server: CompletionsServer, port: int = 0) -> Iterator[None]:
    """Let a server be asked until the block ends."""
    with answering(_handler_of(server), port) as own:
        server.url = f"http://127.0.0.1:{own}"
        yield


def _handler_of(server: CompletionsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.answer(server.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(server.post(self.path, body))

        def answer(self, found: dict[str, Any] | int | None) -> None:
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                found = 401
            if found is None:
                self.close_connection = True
                self.connection.close()
                return
            status = found if isinstance(found, int) else 200
            body = {"error": {"message": "as ordered"}} if isinstance(found, int) else found
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler
