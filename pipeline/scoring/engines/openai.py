"""A teacher behind servers of the completions API with `prompt_logprobs`, as in vLLM.

A piece is a request; servers batch them. An answer is kept only once its server has again given the
job's own losses of a plain text: a server that went wrong gives no sign of it.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.models.probe import probe_tokens
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines.completions import NonsenseError
from pipeline.scoring.engines.endpoints import Endpoint, Endpoints
from pipeline.scoring.engines.engine_settings import Handshake, ServedSettings
from pipeline.scoring.engines.handshake import Answer, ask, require_same_teacher, shake_hands
from pipeline.scoring.engines.interface import EngineError, Line, ScoredDocuments, Work, line_of
from pipeline.scoring.sidecars import DocumentTokens
from schemas.distribution_rule import DistributionRule
from schemas.stored_distributions import TopTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ServedEngine:
    """A served teacher, made by `connect`: an `Engine`."""

    endpoints: Endpoints
    rule: ContextRule
    vocab_size: int
    probe: Sequence[int]
    handshake: Handshake
    distributions: DistributionRule | None = None

    def score(
        self,
        tokens: DocumentTokens,
        pieces: Pieces,
        *,
        names: Sequence[str] = (),
        advance: Callable[[int], object] = int,
    ) -> ScoredDocuments:
        """See `Engine.score`; EngineError if attempts ran out without usable answers."""
        start = time.perf_counter()
        self.endpoints.resume()
        losses = np.full(len(tokens.input_ids), np.nan, np.float32)
        rule = self.distributions
        top = None if rule is None else TopTokens.empty(tokens.starts, rule)
        left: list[tuple[Line, str]] = []
        for number in range(len(pieces)):
            document = int(pieces.document[number])
            line = line_of(tokens, pieces, number, self.rule)
            if len(line.targets if rule is None else line.positions):
                left.append((line, json.dumps(names[document]) if names else str(document)))
        num_tokens = sum(len(line.input_ids) for line, _ in left)
        while left:
            given = self._ask_all(left, advance)
            # Nobody knows which of a server's answers were right before it went wrong.
            asked = {server for _, server in given}
            void = {server for server in asked if not self.endpoints.vouch(server)}
            for (line, _), (answer, server) in zip(left, given, strict=True):
                if server not in void:
                    losses[line.targets] = answer.losses[line.places]
                    _put(top, line, answer)
            left = [one for one, (_, server) in zip(left, given, strict=True) if server in void]
            advance = int  # repeated requests were counted already
            for server in void:
                logger.warning("asking again for what %s gave: %s", server.url, server.disproof)
        work = Work(num_tokens, num_tokens, time.perf_counter() - start)
        return ScoredDocuments(losses, work, top)

    def prove(self, server: Endpoint) -> None:
        """Compare a server with the first; errors of `shake_hands` and `require_same_teacher`."""
        length, rule = self.rule.teacher_seq_length, self.distributions
        now = shake_hands(self.endpoints, server, self.probe, length=length, rule=rule)
        require_same_teacher(self.handshake, now, server.url)

    def _ask_all(
        self, asked: Sequence[tuple[Line, str]], advance: Callable[[int], object]
    ) -> list[tuple[Answer, Endpoint]]:
        """Return each piece's answer and its server, not yet vouched for."""
        settings = self.endpoints.settings
        num_left = sum(not server.disproof for server in self.endpoints.servers)
        pool = ThreadPoolExecutor(settings.concurrency * max(1, num_left))
        given = []
        try:
            answers = [pool.submit(self._score_line, line, name) for line, name in asked]
            for (line, _), answer in zip(asked, answers, strict=True):
                given.append(answer.result())
                advance(len(line.targets))
        except BaseException:
            self.endpoints.interrupt()  # wakes the threads that wait to ask again
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return given

    def _score_line(self, line: Line, name: str) -> tuple[Answer, Endpoint]:
        input_ids = line.input_ids.tolist()

        def ask_one(server: Endpoint) -> tuple[Answer, Endpoint]:
            return ask(self.endpoints, server, input_ids, self.distributions), server

        try:
            return self.endpoints.retry(ask_one)
        except EngineError as error:
            raise EngineError(f"document {name}: {error}") from error


def _put(top: TopTokens | None, line: Line, answer: Answer) -> None:
    if top is not None and answer.ids is not None and answer.log_probs is not None:
        # The state before a token predicts it; the last one predicts the token after the document.
        states = np.append(line.places - 1, len(line.input_ids) - 1)[: len(line.positions)]
        top.put(line.positions, answer.ids[states], answer.log_probs[states])


def connect(
    settings: ServedSettings,
    rule: ContextRule,
    *,
    dataset: Dataset,
    api_key: str = "",
    known: Handshake | None = None,
    distributions: DistributionRule | None = None,
) -> ServedEngine:
    """Return a dataset's teacher on servers, after checking that all are the same.

    They are compared with the job's handshake, `known`; None takes the first server's. EngineError
    if a server can't be reached, has another model or version, or gives no log-probabilities.
    """
    own = probe_tokens(dataset)
    context = rule.first_token_id
    probe = (own if context is None else [context, *own])[: rule.teacher_seq_length]
    endpoints = Endpoints(settings, api_key=api_key)
    if known is None:
        known = _first_handshake(endpoints, probe, rule, distributions)
    vocab_size = load_dataset_tokenizer(dataset, "teacher").vocab_size
    engine = ServedEngine(endpoints, rule, vocab_size, probe, known, distributions)
    for server in endpoints.servers:
        endpoints.retry(engine.prove, server)
    endpoints.prove = engine.prove
    return engine


def _first_handshake(
    endpoints: Endpoints,
    probe: Sequence[int],
    rule: ContextRule,
    distributions: DistributionRule | None,
) -> Handshake:
    def shake(server: Endpoint) -> Handshake:
        try:
            length = rule.teacher_seq_length
            return shake_hands(endpoints, server, probe, length=length, rule=distributions)
        except NonsenseError as error:
            raise EngineError(
                f"{server.url} gives no log-probabilities of a prompt ({error}): serve the model "
                "with vLLM, which takes token ids and prompt_logprobs"
            ) from error

    return endpoints.retry(shake, endpoints.servers[0])
