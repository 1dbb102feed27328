"""Each engine's settings, passed from a command's options to its workers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.command_line.option_parsing import Option, require_least
from schemas.distribution_rule import DRAWS, MOST_ENTRIES, DistributionRule


@dataclass(frozen=True)
class TopSettings:
    """What of a teacher's distributions is stored with its losses.

    Attributes:
        top_k: also store the K likeliest next tokens at every position, in the teacher's ids, with
            their log-probabilities; 1 to 255.
        top_mass: fewer than --top-k if the likeliest together hold this mass (default: 1).
        top_log_probs: how log-probabilities are stored; uint8 is off by about 0.02 nats at 1 nat,
            float16 by 0.0005.
        draws: also store N draws at every position from what --top-k leaves out; distill then
            follows the teacher's whole distribution on average, not its likeliest tokens alone
            (default: 4; none with --top-mass or from a server).
        draws_seed: seed of the draws; scores of different seeds are kept apart.
        entropy_above: store --top-k and --draws only at positions whose entropy, as far as --top-k
            shows, is above this; other labels are learned by cross entropy.
    """

    top_k: Annotated[int | None, Option("K")] = None
    top_mass: Annotated[float | None, Option("P")] = None
    top_log_probs: Literal["uint8", "float16"] = "uint8"
    draws: Annotated[int | None, Option("N")] = None
    draws_seed: int = 0
    entropy_above: Annotated[float, Option("NATS")] = 0.0

    def __post_init__(self) -> None:
        if self.top_k is None:
            if self.top_mass is not None or self.top_log_probs != "uint8":
                raise ValueError("top_mass and top_log_probs need top_k")
            if self.draws or self.draws_seed:
                raise ValueError("draws= needs top_k: draws are of what the likeliest leave out")
            if self.entropy_above:
                raise ValueError("entropy_above needs top_k: losses are stored of all tokens")
            return
        if not 1 <= self.top_k <= MOST_ENTRIES:
            raise ValueError(f"top_k={self.top_k} is not between 1 and {MOST_ENTRIES}")
        if not 0 < (1.0 if self.top_mass is None else self.top_mass) <= 1:
            raise ValueError(f"top_mass={self.top_mass} is not above 0 and at most 1")
        if not 0 <= self.entropy_above < float("inf"):
            raise ValueError(f"entropy_above={self.entropy_above} is not 0 or more nats")
        self._check_draws()

    def rule(self, vocab_size: int) -> DistributionRule | None:
        """Return the rule for storing this vocabulary's tokens; None without `top_k`.

        ValueError if the vocabulary is smaller than K.
        """
        if self.top_k is None:
            return None
        if self.top_k > vocab_size:
            raise ValueError(
                f"top_k={self.top_k} is more than the teacher's vocabulary of {vocab_size} tokens"
            )
        mass = 1.0 if self.top_mass is None else self.top_mass
        draws = self.draws
        if draws is None:
            room = min(vocab_size, MOST_ENTRIES) - self.top_k > DRAWS
            draws = DRAWS if room and self.top_mass is None else 0
        drawn = draws, self.draws_seed, self.entropy_above
        rule = DistributionRule(self.top_k, mass, vocab_size, self.top_log_probs, *drawn)
        if rule.draws and rule.shape.width > vocab_size:
            raise ValueError(
                f"top_k={self.top_k}, draws={draws} and the text's own token are more "
                f"than the teacher's vocabulary of {vocab_size} tokens: lower top_k"
            )
        return rule

    def _check_draws(self) -> None:
        assert self.top_k is not None
        without = self.draws == 0 or (self.draws is None and self.top_mass is not None)
        if without and self.draws_seed:
            raise ValueError(f"draws_seed={self.draws_seed} needs draws=")
        if self.draws and not 0 < self.draws < MOST_ENTRIES - self.top_k:
            raise ValueError(
                f"draws={self.draws} is not between 1 and {MOST_ENTRIES - 1 - self.top_k}, what "
                f"top_k={self.top_k} leaves of {MOST_ENTRIES - 1}"
            )
        if self.draws and self.top_mass is not None:
            raise ValueError(
                f"draws={self.draws} samples from all that top_k leaves out, whatever its mass: "
                "leave out top_mass"
            )
        if not 0 <= self.draws_seed < 1 << 63:
            raise ValueError(f"draws_seed={self.draws_seed} is not between 0 and 2^63 - 1")


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
        require_least(self, "batch_tokens", "threads", least=0)


@dataclass(frozen=True)
class ServedSettings:
    """A model behind servers of the completions API with `prompt_logprobs`, as in vLLM.

    Attributes:
        endpoint: a server's URL, with or without /v1; give several for servers of the same model.
        model: the teacher's name at the servers.
        quantization: the teacher's quantization at the servers, such as fp8 or none; they don't
            report it.
        engine_version: vLLM's version, if the servers don't report it.
        concurrency: requests under way at each server.
        answer_seconds: longest time that one answer may take, to its last byte.
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
        require_least(self, "concurrency", "attempts")
        if not 0 < self.answer_seconds < float("inf"):
            raise ValueError(f"answer_seconds={self.answer_seconds} is not a positive number")


@dataclass(frozen=True)
class Handshake:
    """A job's first server, with which every server is compared.

    `losses` are a plain text's, in nats.
    """

    program: str
    version: str
    losses: tuple[float, ...]

    def describe(self) -> str:
        """Return program and version in words."""
        return f"{self.program or 'a server'} {self.version or 'of unknown version'}"
