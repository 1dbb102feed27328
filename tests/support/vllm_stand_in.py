"""vLLM's offline interface around transformers: the names and signatures that are used of it.

Behaviour is that of vLLM 0.20: the first prompt token has no log-probability, each other place maps
token ids to `Logprob`s, and one token at least is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from transformers import AutoModelForCausalLM

made: list[dict[str, Any]] = []
"""The arguments of each `LLM` so far."""


class TokensPrompt(TypedDict):
    """A prompt in tokens."""

    prompt_token_ids: list[int]


@dataclass
class SamplingParams:
    """What is generated, and what is told of it."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        """Refuse what vLLM refuses."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")


@dataclass
class Logprob:
    """One log-probability."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestOutput:
    """What became of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    finished: bool = True


class LLM:
    """A model."""

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        seed: int | None = 0,
        max_model_len: int | None = None,
        enable_prefix_caching: bool | None = None,
    ) -> None:
        """Load it."""
        made.append(dict(locals()))
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._max_model_len = max_model_len
        vocabulary = self._model.config.vocab_size
        model_config = SimpleNamespace(get_vocab_size=lambda: vocabulary)
        self.llm_engine = SimpleNamespace(model_config=model_config)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[TokensPrompt],
        sampling_params: SamplingParams,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return an output for each prompt, in order."""
        outputs = []
        for number, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            assert self._max_model_len is None or len(ids) < self._max_model_len
            values = self._model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            told: list[dict[int, Logprob] | None] | None = None
            if sampling_params.prompt_logprobs is not None:
                own = [{i: Logprob(float(v[i]))} for i, v in zip(ids[1:], values, strict=False)]
                told = [None, *own]
            outputs.append(RequestOutput(str(number), ids, told))
        return outputs
