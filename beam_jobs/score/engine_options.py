"""The options of `score` that say what runs the teacher."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from beam_jobs.errors import OptionsError
from pipeline.scoring.engines.settings import ServedSettings
from vocag_cli.options import Option

EngineName = Literal["transformers", "openai"]

API_KEY = "VOCAG_API_KEY"
"""Environment variable with the key that servers ask for; no option, for command lines are seen."""

_OF_SERVERS = ("endpoint", "model", "quantization", "engine_version")


@dataclass(frozen=True)
class EngineOptions:
    """What runs the teacher.

    Attributes:
        name: what runs the teacher; openai asks servers of the completions API that give
            prompt_logprobs, as vLLM does.
        endpoint: a server's URL; give several for servers of the same model.
        model: the teacher's name at the servers.
        quantization: of the teacher at the servers, such as fp8 or none, which they don't report.
        engine_version: of the servers' program, if they don't report it.
        concurrency: requests under way at each server.
        requests_per_second: to each server at most (default: as many as it answers).
        answer_seconds: that a server may take for an answer.
        attempts: at each request, with growing waits, before the job ends.
    """

    name: EngineName = "transformers"
    endpoint: Annotated[tuple[str, ...] | None, Option("URL", form="repeated")] = None
    model: Annotated[str, Option("NAME")] = ""
    quantization: Annotated[str, Option("NAME")] = ""
    engine_version: Annotated[str, Option("TEXT")] = ""
    concurrency: int = 16
    requests_per_second: float = 0.0
    answer_seconds: float = 600.0
    attempts: int = 10

    def __post_init__(self) -> None:
        """Check what belongs together.

        Raises:
            OptionsError: with the option and the rule.
        """
        if self.name not in get_args(EngineName):
            raise OptionsError(f"--engine {self.name} is none of {', '.join(get_args(EngineName))}")
        if self.name == "openai":
            if not self.endpoint or not self.model or not self.quantization:
                raise OptionsError(
                    "--engine openai needs --endpoint, --model and --quantization (such as none or "
                    "fp8: a server does not tell it, and losses of another one are others)"
                )
        else:
            for name in _OF_SERVERS:
                if getattr(self, name):
                    option = "--" + name.replace("_", "-")
                    raise OptionsError(f"{option} is of no use with --engine {self.name}")
        for name in ("concurrency", "attempts"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise OptionsError(f"{option} {getattr(self, name)} is below 1")
        for name in ("requests_per_second", "answer_seconds"):
            value = getattr(self, name)
            if not 0 <= value < float("inf") or (name == "answer_seconds" and not value):
                raise OptionsError(f"--{name.replace('_', '-')} {value} is no positive number")

    def served_settings(self) -> ServedSettings:
        """Return how servers are asked."""
        return ServedSettings(
            endpoints=self.endpoint or (),
            model=self.model,
            concurrency=self.concurrency,
            requests_per_second=self.requests_per_second,
            timeout_seconds=self.answer_seconds,
            attempts=self.attempts,
        )


def api_key() -> str:
    """Return the key of the servers from the environment of this process, "" for none."""
    return os.environ.get(API_KEY, "")
