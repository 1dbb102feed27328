"""How each engine is run; plain values, which travel to workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformersSettings:
    """A model in this process.

    Attributes:
        device: such as "cuda:1"; "" takes the GPU where there is one.
        batch_tokens: places per batch; 0: the device's default.
        threads: on a CPU; 0: torch's default.
    """

    device: str = ""
    batch_tokens: int = 0
    threads: int = 0


@dataclass(frozen=True)
class ServedSettings:
    """A model behind servers of the completions API with `prompt_logprobs`.

    Attributes:
        endpoints: their URLs, with or without `/v1`; all serve the same model.
        model: its name there.
        concurrency: requests under way at each of them.
        requests_per_second: to each of them at most; 0.0: as many as they answer.
        timeout_seconds: that an answer may take.
        attempts: at each request, the first included.
        backoff_seconds: before the second attempt; doubled before each further one.
        version: that all of them must tell, which scores are named after; "" for the first one's.
        probe_losses: that all of them must give a plain text, nats, see `connect`; () for the first
            one's.
    """

    endpoints: tuple[str, ...]
    model: str
    concurrency: int = 16
    requests_per_second: float = 0.0
    timeout_seconds: float = 600.0
    attempts: int = 10
    backoff_seconds: float = 1.0
    version: str = ""
    probe_losses: tuple[float, ...] = ()


EngineSettings = TransformersSettings | ServedSettings
