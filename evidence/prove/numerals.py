"""How a student writes numbers and indents, where two tokenizers write them differently.

A tokenizer that packs digits writes 2015 as one token, its teacher's as four. A student that
believes too much of such a teacher expects single digits where its own tokenizer never writes any.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from vocag import Tokenizer

KINDS = {"numbers": rb"[0-9]+", "indents": rb"(?<=\n)[ \t]+"}
BATCH = 20


@dataclass(frozen=True)
class Numbers:
    """The tokens of a vocabulary that numbers are written with.

    Attributes:
        tokenizer: of the student.
        num_rows: of its output layer.
    """

    tokenizer: Tokenizer
    num_rows: int

    @cached_property
    def packed(self) -> NDArray[np.bool_]:
        """Tokens of two digits or more, with or without a space before them, [num_rows]."""
        return self._matching(rb" ?[0-9]{2,}")

    @cached_property
    def groups(self) -> Tensor:
        """Packed, one digit, a lone space: which tokens each has, float64 [num_rows, 3]."""
        found = [self.packed, self._matching(rb" ?[0-9]"), self._matching(rb" ")]
        return torch.tensor(np.stack(found, -1), dtype=torch.float64)

    def _matching(self, pattern: bytes) -> NDArray[np.bool_]:
        spelt = map(self.tokenizer.token_bytes, range(self.num_rows))
        return np.array([re.fullmatch(pattern, own) is not None for own in spelt])

    def sums(self, ids: Tensor, log_probs: Tensor) -> NDArray[np.float64]:
        """Return what a piece of a text says of its packed numbers: how many, bytes, nats, groups.

        The last three are what was expected there of `groups`.

        Args:
            ids: int64 [n].
            log_probs: of the tokens before each, float64 [n, num_rows].
        """
        at = torch.tensor(self.packed[ids.numpy()])
        labels, known = ids[at], log_probs[at]
        nats = -known.gather(1, labels[:, None]).sum()
        size = sum(len(self.tokenizer.token_bytes(label).strip()) for label in labels.tolist())
        expected = (known.exp() @ self.groups).sum(0).tolist()
        return np.array([len(labels), size, float(nats), *expected])


def find_odd(tokenizer: Tokenizer, prompt: bytes, written: Sequence[int]) -> dict[str, list[int]]:
    """Return how many numbers and indents a student has written, and how many of them oddly.

    Odd is what its own tokenizer would have split elsewhere. The text's last run may not be over,
    and doesn't count.

    Args:
        tokenizer: of the student.
        prompt: what it was to go on with.
        written: the tokens that it wrote.
    """
    sizes = [len(tokenizer.token_bytes(token)) for token in written]
    text = prompt + b"".join(map(tokenizer.token_bytes, written))
    text = text.decode("utf-8", "ignore").encode()
    batch = tokenizer.tokenize_batch([text])
    if batch.failures:
        return {kind: [0, 0] for kind in KINDS}
    own = {len(prompt) + end for end in (0, *np.cumsum(sizes).tolist())}
    usual = {0, *batch.byte_offsets[:, 1].tolist()}
    found = {kind: [0, 0] for kind in KINDS}
    for kind, pattern in KINDS.items():
        for run in re.finditer(pattern, text):
            # What begins in the prompt was split by the tokenizer, not by the student.
            if run.start() >= len(prompt) and run.end() < len(text):
                inside = set(range(run.start(), run.end() + 1))
                found[kind][0] += 1
                found[kind][1] += own & inside != usual & inside
    return found


@torch.inference_mode()
def write_on(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[bytes],
    *,
    context: int,
    num_tokens: int,
    seed: int = 0,
) -> Iterable[list[int]]:
    """Yield a continuation of each prompt, sampled at temperature 1, without what ends it."""
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    how = GenerationConfig(
        max_new_tokens=num_tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=end,
        pad_token_id=context,
    )
    batch = tokenizer.tokenize_batch(list(prompts))
    bounds = zip(batch.cu_tokens[:-1], batch.cu_tokens[1:], strict=True)
    ids = [[context, *batch.input_ids[slice(*own)].tolist()] for own in bounds]
    for start in range(0, len(ids), BATCH):
        own = ids[start : start + BATCH]
        longest = max(map(len, own))
        given = torch.tensor([[context] * (longest - len(row)) + row for row in own])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in own])
        whole = cast(Any, model).generate(given, attention_mask=mask, generation_config=how)
        for row in whole[:, longest:].tolist():
            yield row[: row.index(end)] if end in row else row


def beginning(text: str, share: float, *, at: str) -> str:
    r"""Return about a share of a text from its beginning: up to the last place where `at` occurs.

    Example:
        >>> beginning("def f(x):\n    return x\n", 0.6, at="\n")
        'def f(x):'
    """
    return text[: int(share * len(text))].rpartition(at)[0]
