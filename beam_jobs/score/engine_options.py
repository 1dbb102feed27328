"""The options of `score` that say what runs the teacher."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from beam_jobs.errors import OptionsError
from pipeline.scoring.engines.settings import ServedSettings, VllmSettings
from vocag_cli.options import Option

EngineName = Literal["transformers", "openai", "vllm"]

API_KEY = "VOCAG_API_KEY"
"""Environment variable with the key that servers ask for; no option, for command lines are seen."""

_OF_SERVERS = ("endpoint", "model", "engine_version")
_OF_OTHERS = ("quantization",)


@dataclass(frozen=True)
class EngineOptions:
    """What runs the teacher.

    Attributes:
        name: what runs the teacher; openai asks servers of the completions API (vLLM, SGLang,
            llama-cpp-python), vllm loads vLLM here.
        endpoint: a server's URL; give several for servers of the same model.
        model: the teacher's name at the servers.
        quantization: of the teacher at the servers, such as fp8 or none, which they don't tell; for
            vllm, what it is to use (default there: what the model's configuration says).
        engine_version: of the servers' program, where they don't tell.
        concurrency: requests under way at each server.
        requests_per_second: to each server at most (default: as many as it answers).
        answer_seconds: that a server may take for an answer.
        attempts: at each request, with growing waits, before the job ends.
        tensor_parallel_size: GPUs that share each layer in vLLM.
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
    tensor_parallel_size: int = 1

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
            unused = [*_OF_SERVERS, *(_OF_OTHERS if self.name == "transformers" else ())]
            for name in unused:
                if getattr(self, name):
                    option = "--" + name.replace("_", "-")
                    raise OptionsError(f"{option} is of no use with --engine {self.name}")
        for name in ("concurrency", "attempts", "tensor_parallel_size"):
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

    def vllm_settings(self) -> VllmSettings:
        """Return how vLLM is loaded."""
        return VllmSettings(self.quantization or "none", self.tensor_parallel_size)


def api_key() -> str:
    """Return the key of the servers from the environment of this process, "" for none."""
    return os.environ.get(API_KEY, "")
