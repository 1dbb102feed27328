"""A teacher in vLLM, in this process: prompt log-probabilities of whole documents.

vLLM is no dependency: its wheels bring a torch of their own, so it is installed by whoever runs it
(`pip install vllm`, in an environment beside `vocag[beam]`). No machine that this was written on
could run it: the tests hold the code against a stand-in with the signatures of vLLM 0.20's `LLM`,
`SamplingParams`, `TokensPrompt` and `RequestOutput`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import batched
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines.interface import (
    EngineError,
    Line,
    ScoredDocuments,
    Work,
    line_of,
)
from pipeline.scoring.engines.settings import VllmSettings
from pipeline.scoring.sidecars import DocumentTokens

# vLLM makes batches of its own; this many pieces wait in its queue, and their answers in memory.
_QUEUED_PIECES = 1024
# Of a log-probability above 0: what rounding a softmax may leave.
_ROUNDING = 1e-4


class VllmEngine:
    """A teacher in vLLM that is ready to score.

    Attributes:
        rule: with which context.
        vocab_size: rows of the model's output layer.
    """

    def __init__(self, llm: Any, rule: ContextRule, vllm: Any) -> None:
        """Take a model.

        Args:
            llm: `vllm.LLM`.
            rule: with which context.
            vllm: the package.
        """
        self.rule = rule
        self.vocab_size = int(llm.llm_engine.model_config.get_vocab_size())
        self._llm = llm
        self._make_prompt = vllm.TokensPrompt
        # One token is generated and thrown away: vLLM takes no 0.
        self._params = vllm.SamplingParams(
            max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False
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
            EngineError: vLLM gave what can be no log-probabilities.
        """
        start = time.perf_counter()
        work = Work()
        losses = np.full(len(tokens.input_ids), np.nan, np.float32)
        for lines in batched(self._lines(tokens, pieces), _QUEUED_PIECES):
            prompts = [self._make_prompt(prompt_token_ids=n.input_ids.tolist()) for n in lines]
            outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
            if len(outputs) != len(lines):
                raise EngineError(f"vLLM gave {len(outputs)} answers to {len(lines)} prompts")
            for line, output in zip(lines, outputs, strict=True):
                losses[line.targets] = _losses_of(line, output, tokens, names)
                work.num_tokens += len(line.input_ids)
                advance(len(line.targets))
        work.num_places = work.num_tokens
        work.seconds = time.perf_counter() - start
        return ScoredDocuments(losses, work)

    def matmul_rate(self) -> float:
        """Return 0.0: vLLM does not say what it computes."""
        return 0.0

    def _lines(self, tokens: DocumentTokens, pieces: Pieces) -> Iterator[Line]:
        for number in range(len(pieces)):
            line = line_of(tokens, pieces, number, self.rule)
            if len(line.places):
                yield line


def load_vllm(source: str, rule: ContextRule, settings: VllmSettings, *, dtype: str) -> VllmEngine:
    """Load a teacher into vLLM.

    Args:
        source: a folder in the layout of Hugging Face.
        rule: with which context; its longest piece and one token more are the model's length.
        settings: quantization and parallelism.
        dtype: of activations and of weights that are not quantized.

    Raises:
        EngineError: vLLM is not installed.

    Example:
        >>> load_vllm("models/qwen3-moe-fp8", rule, VllmSettings("fp8", 4), dtype="bfloat16")
    """
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            f"--engine vllm needs vLLM, which can't be imported ({error}): pip install vllm, or "
            "serve the model elsewhere and give --engine openai --endpoint"
        ) from error
    llm = vllm.LLM(
        model=source,
        dtype=dtype,
        quantization=None if settings.quantization == "none" else settings.quantization,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_model_len=rule.teacher_seq_length + 1,
        # tokens go in and none is read as text
        skip_tokenizer_init=True,
        # a prompt whose log-probabilities are asked for is computed whole
        enable_prefix_caching=False,
        seed=0,
    )
    return VllmEngine(llm, rule, vllm)


def _losses_of(
    line: Line, output: Any, tokens: DocumentTokens, names: Sequence[str]
) -> NDArray[np.float32]:
    """Return the losses of a piece's targets."""
    found, ids = output.prompt_logprobs, line.input_ids.tolist()
    document = int(np.searchsorted(tokens.starts, line.targets[0], "right")) - 1
    name = names[document] if names else str(document)
    if found is None or len(found) != len(ids) or list(output.prompt_token_ids) != ids:
        raise EngineError(
            f"vLLM gave {0 if found is None else len(found)} log-probabilities of the {len(ids)} "
            f'tokens of a piece of document "{name}", or those of other tokens'
        )
    values = np.empty(len(line.places), np.float32)
    for n, place in enumerate(line.places.tolist()):
        entry = (found[place] or {}).get(ids[place])
        value = np.nan if entry is None else float(entry.logprob)
        if not value <= _ROUNDING:
            raise EngineError(
                f"vLLM gave {value} for the log-probability of token {place} of a piece of "
                f'document "{name}": its dtype is too narrow, or its weights are damaged'
            )
        values[n] = max(0.0, -value)
    return values
