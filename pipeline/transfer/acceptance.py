"""How many tokens of a draft model a target model accepts in speculative decoding.

The target keeps the draft's tokens before the first that it would not have written, and adds one.
The output is the target's own continuation, so it is written first, and rounds are counted along
it.

With one vocabulary, a greedy round accepts tokens while they are the draft's likeliest, too. A
sampled one (Leviathan et al. 2023, arXiv 2211.17192) that emits x has accepted the draft's with
probability min(p(x), q(x)) / p(x).

With two (universal assisted decoding) the target's tokenizer reads the draft's bytes: tokens are
accepted while they equal the continuation. Sampled, two samples match with chance Σ p·q, less than
speculative sampling's Σ min(p, q).
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from pipeline.models.fit import tokenize_alike
from pipeline.models.weights import generate_plainly, refuse_nonsense
from pipeline.tokenization import Tokenizer
from pipeline.tokenization.conversion import convert_sentencepiece
from pipeline.tokenization.definition import token_names
from pipeline.transfer.measure import context_of, num_positions

# llama.cpp's check
_MAX_DIFFERENCE, _FIRST_COMPARED = 128, 5


@dataclass(frozen=True)
class Acceptance:
    """Results of proposals, in the target's tokens; values can be added.

    Rounds are the target's passes, expected ones if sampled.
    """

    rounds: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def rate(self) -> float:
        """Accepted share of the proposed tokens; 0 without proposals."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def length(self) -> float:
        """Tokens per round, including the target's own; 1 gains nothing."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class TokenizedModel:
    """A model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        """Let the model write what it finds likely: its distributions are compared."""
        generate_plainly(self.model)
        refuse_nonsense(self.model, self.tokenizer.source)

    @property
    def num_rows(self) -> int:
        """Rows of embeddings and output layer, as servers read them."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def encode(self, text: bytes) -> list[int] | None:
        """Return a text's tokens after the context token; None if it can't be tokenized."""
        batch = self.tokenizer.tokenize_batch([text])
        if batch.failures:
            return None
        return [context_of(self.tokenizer), *batch.input_ids.tolist()]

    def spell(self, ids: Sequence[int]) -> bytes:
        """Join tokens' bytes."""
        return b"".join(map(self.tokenizer.token_bytes, ids))

    @torch.inference_mode()
    def write(self, ids: Sequence[int], num_tokens: int, *, sampled: bool) -> list[int]:
        """Return a continuation of at most `num_tokens`, at temperature 1 if sampled."""
        end = self.tokenizer.eos_token_id
        how = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=sampled,
            top_k=0 if sampled else None,
            eos_token_id=end,
            pad_token_id=0 if end is None else end,
        )
        given = self._batch(ids, num_tokens - 1)
        whole = cast(Any, self.model).generate(
            given, attention_mask=torch.ones_like(given), generation_config=how
        )
        written: list[int] = whole[0, len(ids) :].tolist()
        return written

    @torch.inference_mode()
    def predict(self, ids: Sequence[int], num_tokens: int) -> Tensor:
        """Return log-probabilities at the last places, float32 [num_tokens, V]."""
        given = self._batch(ids)
        logits = cast(Any, self.model)(input_ids=given, use_cache=False).logits[0]
        predicted: Tensor = logits[-num_tokens - 1 : -1].float().log_softmax(-1)
        return predicted

    def _batch(self, ids: Sequence[int], num_more: int = 0) -> Tensor:
        needed, room = len(ids) + num_more, num_positions(self.model)
        if needed > room:
            raise ValueError(
                f"a prompt and what follows it are {needed} tokens, the model of "
                f"{self.tokenizer.source} was made for {room}: lower --prompt-bytes or --tokens"
            )
        return torch.tensor([list(ids)], device=self.model.device)


def measure_acceptance(
    target: TokenizedModel,
    draft: TokenizedModel,
    prompts: Sequence[bytes],
    *,
    sampled: bool,
    num_tokens: int = 64,
    num_proposed: int = 5,
) -> Iterator[Acceptance]:
    """Yield the results of a draft's proposals after each UTF-8 prompt.

    The target writes `num_tokens`; the draft proposes `num_proposed` a round. Both sample at
    temperature 1 if `sampled`, else greedily.

    Raises:
        ValueError: a prompt that the target's tokenizer can't read, or that exceeds a model's rows
            or positions.
    """
    shared = tokenize_alike(target.tokenizer, draft.tokenizer)
    for number, prompt in enumerate(prompts):
        ids = target.encode(prompt)
        if ids is None:
            raise ValueError(f"prompt {number} can't be read by {target.tokenizer.source}")
        written = target.write(ids, num_tokens, sampled=sampled)
        if shared:
            chances = _chances(target, draft, ids, written, sampled=sampled)
            yield _count_rounds(chances, num_proposed)
        else:
            yield _count_texts(target, draft, prompt, written, num_proposed, sampled=sampled)


def _chances(
    target: TokenizedModel,
    draft: TokenizedModel,
    ids: list[int],
    written: list[int],
    *,
    sampled: bool,
) -> list[float]:
    """Return each written token's chance that it was an accepted proposal."""
    expected = draft.predict(ids + written, len(written))
    tokens = torch.tensor(written, device=expected.device)
    if not sampled:
        return (expected.argmax(-1) == tokens).double().tolist()
    own = target.predict(ids + written, len(written))
    num_known = min(own.shape[-1], expected.shape[-1])  # beyond it there is padding alone
    tokens = tokens.clamp_max(num_known - 1)[:, None]
    ratio = expected.gather(1, tokens) - own.gather(1, tokens)
    return ratio.exp().clamp_max(1.0)[:, 0].double().tolist()


def _count_rounds(chances: Sequence[float], num_proposed: int) -> Acceptance:
    """Return expected counts, by the chance that a round starts at each token."""
    starts = [1.0] + [0.0] * (len(chances) + num_proposed + 1)
    rounds = proposed = accepted = 0.0
    for first in range(len(chances)):
        # The target adds a token: proposals leave room for it.
        last = min(first + num_proposed, len(chances) - 1)
        reached = starts[first]
        rounds, proposed = rounds + reached, proposed + reached * (last - first)
        for place in range(first, last):
            # The target's own token replaces a rejected proposal, and the round ends.
            starts[place + 1] += reached * (1 - chances[place])
            reached *= chances[place]
            accepted += reached
        starts[last + 1] += reached
    return Acceptance(rounds, proposed, accepted)


def _count_texts(
    target: TokenizedModel,
    draft: TokenizedModel,
    prompt: bytes,
    written: list[int],
    num_proposed: int,
    *,
    sampled: bool,
) -> Acceptance:
    done, total = 0, Acceptance()
    while done < len(written):
        text = prompt + target.spell(written[:done])
        room = min(num_proposed, len(written) - done - 1)
        found = _propose(target, draft, text, num_proposed, sampled=sampled)[:room]
        pairs = zip(found, written[done:], strict=False)
        matching = next((n for n, (a, b) in enumerate(pairs) if a != b), len(found))
        total += Acceptance(1, len(found), matching)
        done += matching + 1
    return total


def _propose(
    target: TokenizedModel, draft: TokenizedModel, text: bytes, num_proposed: int, *, sampled: bool
) -> list[int]:
    """Return the draft's continuation in the target's tokens; empty within a character."""
    ids = draft.encode(text)
    if ids is None:
        return []
    more = draft.spell(draft.write(ids, num_proposed, sampled=sampled))
    # A character that the draft has begun is left to the target.
    whole = (text + more).decode(errors="ignore").encode()
    batch = target.tokenizer.tokenize_batch([whole])
    starts = batch.byte_offsets[:, 0]
    behind = batch.input_ids[starts >= len(text)].tolist()
    return behind if len(text) in starts and not batch.failures else []


def judge_servers(target: TokenizedModel, draft: TokenizedModel) -> Iterator[str]:
    """Predict which servers take a draft, and why others don't.

    Source: vLLM's `verify_equal_vocab_size_if_draft_model` (0.27) and llama.cpp's
    `common_speculative_are_compatible` (August 2026), for which rows without a token are `[PADn]`.
    """
    rows = [side.num_rows for side in (target, draft)]
    apart = f"the target has {rows[0]} rows, the draft {rows[1]}"
    other = _first_difference(target.tokenizer, draft.tokenizer, min(rows))
    if rows[0] != rows[1]:
        made = "vocag transfer with --tokenizer TARGET --rows-of TARGET"
        yield f"vLLM refuses the draft: {apart} ({made} makes them equal)"
    else:
        yield f"vLLM takes the draft{f' by its rows alone, but {other}' if other else ''}"
    far = abs(rows[0] - rows[1]) > _MAX_DIFFERENCE
    reason = f"{apart}, more than {_MAX_DIFFERENCE} apart" if far else other
    ends = [_around_text(side.tokenizer) for side in (target, draft)]
    if ends[0] != ends[1]:
        reason = f"texts begin and end with {ends[0]} of the target, {ends[1]} of the draft"
    yield f"llama.cpp refuses the draft: {reason}" if reason else "llama.cpp takes the draft"


def _around_text(tokenizer: Tokenizer) -> list[int | None]:
    own = tokenizer
    pairs = ((own.adds_bos, own.bos_token_id), (own.adds_eos, own.eos_token_id))
    return [token if added else None for added, token in pairs]


def _first_difference(target: Tokenizer, draft: Tokenizer, num_rows: int) -> str | None:
    """Return the first differing token from id 5 on, None if the tokenizers match."""
    if tokenize_alike(target, draft):
        return None
    files = [(one.file.definition, one.file_bytes, one.source) for one in (target, draft)]
    names = [token_names(own or convert_sentencepiece(data, source=i)) for own, data, i in files]
    for token in range(_FIRST_COMPARED, num_rows):
        of_target, of_draft = (own.get(token, f"[PAD{token}]") for own in names)
        if of_target != of_draft:
            return f"token {token} is {of_target!r} of the target, {of_draft!r} of the draft"
    return None
