"""A model's answers, each flushed as a JSON line, from which a killed run continues.

lm-eval's own cache can lose answers to a kill.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, hash_args

Likelihood = tuple[float, bool]


class AnswerLog:
    """A model for lm-eval that is never asked twice."""

    rank, world_size = 0, 1

    def __init__(self, model: LM, path: Path) -> None:
        """Read earlier answers; each model and precision needs its own file."""
        self._model = model
        path.parent.mkdir(parents=True, exist_ok=True)
        self._answers = _read(path)
        self._file = path.open("a", encoding="utf-8")
        model.set_cache_hook(self)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def loglikelihood(self, requests: Sequence[Instance]) -> list[Likelihood]:
        """Return (nats, is greedy) for each (context, continuation)."""
        found = self._answer("loglikelihood", requests, self._model.loglikelihood)
        return [(nats, is_greedy) for nats, is_greedy in found]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return each (context, options)'s continuation."""
        return self._answer("generate_until", requests, self._model.generate_until)

    def once(self, kind: str, request: Iterable[Any], ask: Callable[[], Any]) -> Any:
        """Return the kept answer, or ask and keep it."""
        key = hash_args(kind, request)
        if key not in self._answers:
            self.add_partial(kind, request, ask())
        return self._answers[key]

    def add_partial(self, kind: str, request: Iterable[Any], answer: Any) -> None:
        """Keep an answer; called by models."""
        key = hash_args(kind, request)
        if key not in self._answers:
            self._answers[key] = answer
            self._file.write(json.dumps({"key": key, "answer": answer}) + "\n")
            self._file.flush()

    def _answer(
        self, kind: str, requests: Sequence[Instance], ask: Callable[..., Sequence[Any]]
    ) -> list[Any]:
        keys = [hash_args(kind, request.args) for request in requests]
        asked = dict(zip(keys, requests, strict=True))
        questions = [request for key, request in asked.items() if key not in self._answers]
        if questions:
            found = ask(questions, disable_tqdm=not sys.stderr.isatty())  # a log wants no bars
            for request, answer in zip(questions, found, strict=True):
                self.add_partial(kind, request.args, answer)
        return [self._answers[key] for key in keys]


def _read(path: Path) -> dict[str, Any]:
    """Read answers by key; cut off an unfinished last line."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    answers = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            kept = json.loads(line)
            answers[kept["key"]] = kept["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} isn't an answer ({error!r}): delete the line, and it is "
                "asked again"
            ) from error
    return answers
