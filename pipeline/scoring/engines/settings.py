"""How each engine is run: plain values, which travel from a command's options to its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.command_line.options import Option
from schemas.distribution_rule import MOST_ENTRIES, DistributionRule


@dataclass(frozen=True)
class TopSettings:
    """What of a teacher's distributions is stored with its losses.

    Attributes:
        top_k: also store the K likeliest next tokens at every position, in the teacher's ids, with
            their log-probabilities; 1 to 255.
        top_mass: fewer than --top-k if the likeliest together hold this mass (default: 1).
        top_log_probs: how log-probabilities are stored; uint8 is off by about 0.02 nats at 1 nat,
            float16 by 0.0005.
    """

    top_k: Annotated[int | None, Option("K")] = None
    top_mass: Annotated[float | None, Option("P")] = None
    top_log_probs: Literal["uint8", "float16"] = "uint8"

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.top_k is None:
            if self.top_mass is not None or self.top_log_probs != "uint8":
                raise ValueError("--top-mass and --top-log-probs need --top-k")
            return
        if not 1 <= self.top_k <= MOST_ENTRIES:
            raise ValueError(f"--top-k {self.top_k} is not between 1 and {MOST_ENTRIES}")
        if not 0 < (1.0 if self.top_mass is None else self.top_mass) <= 1:
            raise ValueError(f"--top-mass {self.top_mass} is not above 0 and at most 1")

    def rule(self, vocab_size: int) -> DistributionRule | None:
        """Return what is stored of a teacher of this vocabulary, None without --top-k.

        Raises:
            ValueError: the vocabulary has fewer tokens.

        Example:
            >>> TopSettings(16).rule(49152)
            DistributionRule(top_k=16, top_mass=1.0, vocab_size=49152, log_probs='uint8')
        """
        if self.top_k is None:
            return None
        if self.top_k > vocab_size:
            raise ValueError(
                f"--top-k {self.top_k} is more than the teacher's vocabulary of {vocab_size} tokens"
            )
        mass = 1.0 if self.top_mass is None else self.top_mass
        return DistributionRule(self.top_k, mass, vocab_size, self.top_log_probs)


@dataclass(frozen=True)
class TransformersSettings:
    """A model in a worker's own process.

    Attributes:
        device: device such as cuda:1 (default: the GPU if there is one).
        batch_tokens: teacher tokens per batch (default: 2048 on a CPU, 32768 elsewhere).
        threads: threads of each worker on a CPU; set it to get equal bytes on different machines
            (default: torch's choice).
    """

    device: Annotated[str, Option("NAME")] = ""
    batch_tokens: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("batch_tokens", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is below 0")


@dataclass(frozen=True)
class ServedSettings:
    """A model behind servers of the completions API with `prompt_logprobs`, as in vLLM.

    Attributes:
        endpoint: a server's URL, with or without /v1; give several for servers of the same model.
        model: the teacher's name at the servers.
        quantization: the teacher's quantization at the servers, such as fp8 or none; they don't
            report it.
        engine_version: version of the servers' program, if they don't report it.
        concurrency: requests under way at each server.
        answer_seconds: longest time to wait for one answer.
        attempts: attempts at each request, with growing waits, before the job ends.
    """

    endpoint: Annotated[tuple[str, ...] | None, Option("URL", form="repeated")] = None
    model: Annotated[str, Option("NAME")] = ""
    quantization: Annotated[str, Option("NAME")] = ""
    engine_version: Annotated[str, Option("TEXT")] = ""
    concurrency: int = 16
    answer_seconds: float = 600.0
    attempts: int = 10

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} is below 1")
        if not 0 < self.answer_seconds < float("inf"):
            raise ValueError(f"--answer-seconds {self.answer_seconds} is not a positive number")


@dataclass(frozen=True)
class Handshake:
    """What a job's first server says and gives; its workers hold every server against it.

    Attributes:
        program: "vllm", or "" if it does not say.
        version: of its program, "" if it does not say.
        losses: that it gives a plain text, nats; NaN for the first token.
    """

    program: str
    version: str
    losses: tuple[float, ...]

    def describe(self) -> str:
        """Return program and version, as far as they are known."""
        return f"{self.program or 'a server'} {self.version or 'of unknown version'}"
