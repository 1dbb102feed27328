"""A model of lm-eval's that says what it is told to, and counts what it was asked."""

import re
from collections.abc import Callable, Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM


class ScriptedModel(LM):
    """Answers by a function of the prompt; every byte costs one bit, and a token is a word."""

    def __init__(
        self,
        answer: Callable[[str], str] = lambda prompt: "",
        *,
        max_length: int = 1 << 20,
        nats_per_byte: Callable[[str, str], float] = lambda context, text: 0.6931471805599453,
    ) -> None:
        super().__init__()
        self._say, self._nats_per_byte = answer, nats_per_byte
        self.max_length = max_length
        self.asked: list[str] = []

    def tok_encode(self, string: str) -> list[int]:
        return list(range(len(re.findall(r"\S+", string))))

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._generate(request) for request in requests]

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return [self._likelihood(request) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        raise AssertionError("no measure asks for it")

    def _generate(self, request: Instance) -> str:
        prompt, options = request.args
        self.asked.append(prompt)
        text = self._say(prompt)
        for stop in options["until"]:
            text = text.split(stop)[0]
        words = re.findall(r"\s*\S+", text)
        text = "".join(words[: options["max_gen_toks"]])
        self.cache_hook.add_partial("generate_until", request.args, text)
        return text

    def _likelihood(self, request: Instance) -> tuple[float, bool]:
        context, text = request.args
        nats = -self._nats_per_byte(context, text) * len(text.encode())
        self.cache_hook.add_partial("loglikelihood", request.args, (nats, False))
        return nats, False
