"""A teacher behind servers of the completions API with `prompt_logprobs`, as vLLM has it.

    engine = connect(ServedSettings(("http://gpu-7:8000",), "teacher"), rule, ...)
    engine.score(tokens, rule.pieces(index)).losses

A piece is a request, and `concurrency` of them are under way at each server, whose own scheduler
makes batches of them. What comes back is held against what was sent before it is believed. And it
is kept only once its server, asked again for the losses of a plain text, has given the job's own: a
server that went wrong in between gives no sign of it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizers
from pipeline.models.probe import probe_tokens
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines.completions import NonsenseError
from pipeline.scoring.engines.endpoints import Endpoint, Endpoints
from pipeline.scoring.engines.handshake import (
    ServerInfo,
    ask_first,
    ask_losses,
    describe_server,
    require_same_model,
    require_same_program,
)
from pipeline.scoring.engines.interface import (
    EngineError,
    Line,
    ScoredDocuments,
    Work,
    line_of,
)
from pipeline.scoring.engines.settings import ServedSettings
from pipeline.scoring.sidecars import DocumentTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Given:
    """The losses of a piece's targets, and who gave them.

    Attributes:
        losses: float32 [n].
        server: None for a piece that nobody needs to be asked about.
        num_disproofs: of the server, before it was asked.
    """

    losses: NDArray[np.float32]
    server: Endpoint | None = None
    num_disproofs: int = 0


class ServedEngine:
    """A served teacher that is ready to score.

    Attributes:
        rule: with which context.
        vocab_size: of the dataset's teacher tokenizer.
        info: what the first server says of itself.
        probe_losses: float32 [T], of the plain text that all servers were held against.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        rule: ContextRule,
        *,
        vocab_size: int,
        info: ServerInfo,
        probe: Sequence[int],
    ) -> None:
        """Use `connect`."""
        known = endpoints.settings.probe_losses
        self.rule = rule
        self.vocab_size = vocab_size
        self.info = info
        self._endpoints = endpoints
        self._probe = list(probe)
        self.probe_losses = (
            np.array(known, np.float32)
            if known
            else endpoints.retry(
                lambda server: ask_first(endpoints, server, self._probe), endpoints.servers[0]
            )
        )

    def score(
        self,
        tokens: DocumentTokens,
        pieces: Pieces,
        *,
        names: Sequence[str] = (),
        advance: Callable[[int], object] = int,
    ) -> ScoredDocuments:
        """Give each token the loss `-log P(x_l | its context)`, see `Engine.score`.

        Raises:
            EngineError: servers that gave no usable answer until the attempts were spent, or none
                that can be kept.
        """
        start = time.perf_counter()
        self._endpoints.resume()
        work = Work(
            num_requests=-self._endpoints.num_requests, num_retries=-self._endpoints.num_retries
        )
        losses = np.full(len(tokens.input_ids), np.nan, np.float32)
        asked: list[tuple[Line, str]] = []
        for number in range(len(pieces)):
            document = int(pieces.document[number])
            name = json.dumps(names[document]) if names else str(document)
            asked.append((line_of(tokens, pieces, number, self.rule), name))
        for line, answer in self._ask_until_vouched(asked, advance):
            losses[line.targets] = answer
            work.num_tokens += len(line.input_ids)
        work.num_places = work.num_tokens
        work.num_requests += self._endpoints.num_requests
        work.num_retries += self._endpoints.num_retries
        work.seconds = time.perf_counter() - start
        return ScoredDocuments(losses, work)

    def matmul_rate(self) -> float:
        """Return 0.0: the arithmetic is the servers'."""
        return 0.0

    def prove(self, server: Endpoint) -> None:
        """Check that a server is the first one's program, and gives the probe the same losses.

        Raises:
            DisprovedError: it serves another model, is of another version, or has gone wrong.
            NonsenseError: its answer is none.
            PassingError: it is not there.
        """
        require_same_program(describe_server(self._endpoints, server), self.info, server.url)
        now = ask_losses(self._endpoints, server, self._probe)
        require_same_model(self.probe_losses, now, server.url, "those the job started with")

    def _ask_until_vouched(
        self, asked: Sequence[tuple[Line, str]], advance: Callable[[int], object]
    ) -> Iterator[tuple[Line, NDArray[np.float32]]]:
        """Yield each piece with losses that can be kept; pieces whose can't are asked again."""
        left, reasons = list(asked), ""
        for _ in range(self._endpoints.settings.attempts):
            given = self._ask_all(left, advance)
            servers = {answer.server for answer in given if answer.server}
            failures = {server: self._endpoints.vouch(server) for server in servers}
            void = []
            for one, answer in zip(left, given, strict=True):
                server = answer.server
                if server and (failures[server] or answer.num_disproofs != server.num_disproofs):
                    void.append(one)
                else:
                    yield one[0], answer.losses
            if not void:
                return
            left, advance = void, int  # they were counted
            reasons = "; ".join(filter(None, failures.values())) or "it has recovered since"
            logger.warning("%d pieces are asked again: %s", len(left), reasons)
        raise EngineError(
            f"{len(left)} pieces were answered by a server that did not give a plain text the same "
            f"losses before and after, so that they can't be kept ({reasons}): look after the "
            "servers and run the same command again"
        )

    def _ask_all(
        self, asked: Sequence[tuple[Line, str]], advance: Callable[[int], object]
    ) -> list[_Given]:
        """Return what the servers give each piece, whether or not it can be kept."""
        settings = self._endpoints.settings
        pool = ThreadPoolExecutor(settings.concurrency * len(self._endpoints.servers))
        given = []
        try:
            answers = [pool.submit(self._score_line, line, name) for line, name in asked]
            for (line, _), answer in zip(asked, answers, strict=True):
                given.append(answer.result())
                advance(len(line.targets))
        except BaseException:
            self._endpoints.interrupt()  # wakes the threads that wait to ask again
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return given

    def _score_line(self, line: Line, name: str) -> _Given:
        """Return what a server gives a piece; runs in a thread of its own."""
        ids = line.input_ids.tolist()
        if len(ids) < 2 or not len(line.places):
            return _Given(np.empty(0, np.float32))

        def ask(server: Endpoint) -> _Given:
            num_disproofs = server.num_disproofs
            losses = ask_losses(self._endpoints, server, ids)
            return _Given(losses[line.places], server, num_disproofs)

        try:
            return self._endpoints.retry(ask)
        except EngineError as error:
            raise EngineError(f"document {name}: {error}") from error


def connect(
    settings: ServedSettings,
    rule: ContextRule,
    *,
    dataset: Dataset,
    api_key: str = "",
) -> ServedEngine:
    """Return a teacher behind servers, once each has shown that it is the same and can be asked.

    The same is what gives a plain text the losses in the settings, or the first server's: a worker
    that starts later than the job has the job's.

    Args:
        settings: where the servers are, and how they are asked.
        rule: with which context.
        dataset: whose teacher it is.
        api_key: for servers that ask for one.

    Raises:
        EngineError: a server that can't be reached, serves another model, is of another version, or
            gives no log-probabilities of a prompt.

    Example:
        >>> connect(ServedSettings(("http://gpu-7:8000",), "teacher"), rule,
        ...     dataset=open_dataset("aligned")).info.version  # doctest: +SKIP
        '0.20.2'
    """
    own = probe_tokens(dataset)
    context = rule.first_token_id
    probe = (own if context is None else [context, *own])[: rule.teacher_seq_length]
    endpoints = Endpoints(settings, api_key=api_key)
    describe = partial(describe_server, endpoints)
    infos = [endpoints.retry(describe, server) for server in endpoints.servers]
    _require_one_program(infos, endpoints)
    _require_room(infos, endpoints.servers, rule)
    vocab_size = load_dataset_tokenizers(dataset).teacher.vocab_size
    engine = ServedEngine(endpoints, rule, vocab_size=vocab_size, info=infos[0], probe=probe)
    for server in endpoints.servers if settings.probe_losses else endpoints.servers[1:]:
        endpoints.retry(engine.prove, server)
    endpoints.prove_with(engine.prove)
    return engine


def _require_one_program(infos: Sequence[ServerInfo], endpoints: Endpoints) -> None:
    """Check that all servers are of the version that scores are, or will be, named after."""
    first = replace(infos[0], version=endpoints.settings.version or infos[0].version)
    for info, server in zip(infos, endpoints.servers, strict=True):
        try:
            require_same_program(info, first, server.url)
        except NonsenseError as error:
            raise EngineError(str(error)) from error


def _require_room(
    infos: Sequence[ServerInfo], servers: Sequence[Endpoint], rule: ContextRule
) -> None:
    """Check that servers take the longest piece, and the token that they generate after it."""
    for info, server in zip(infos, servers, strict=True):
        if info.max_length is not None and info.max_length < rule.teacher_seq_length + 1:
            raise EngineError(
                f"{server.url} takes {info.max_length} tokens at once, a piece may have "
                f"{rule.teacher_seq_length} and one is generated after it: serve the model with a "
                "longer context (vLLM: --max-model-len), or lower --teacher-seq-length"
            )
