"""Would a server take a draft for a target? What vLLM and llama.cpp check when they start."""

from collections.abc import Iterator

from pipeline.models.fit import tokenize_alike
from pipeline.tokenization import Tokenizer
from pipeline.tokenization.conversion import convert_sentencepiece
from pipeline.tokenization.definition import token_names
from pipeline.transfer.acceptance import Side

# Of llama.cpp's check.
_MAX_DIFFERENCE, _FIRST_COMPARED = 128, 5


def judge_servers(target: Side, draft: Side) -> Iterator[str]:
    """Yield in words which servers take a draft, and why others don't.

    Source: vLLM's `verify_equal_vocab_size_if_draft_model` (0.27) and llama.cpp's
    `common_speculative_are_compatible` (August 2026), for which rows without a token are `[PADn]`.

    Example:
        >>> next(judge_servers(target, draft))  # doctest: +SKIP
        'vLLM refuses the draft: the target has 152064 rows, the draft 151936'
    """
    rows = [side.num_rows for side in (target, draft)]
    apart = f"the target has {rows[0]} rows, the draft {rows[1]}"
    other = _first_difference(target.tokenizer, draft.tokenizer, min(rows))
    if rows[0] != rows[1]:
        yield f"vLLM refuses the draft: {apart} (vocag transfer --rows-of TARGET makes them equal)"
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
    """Return the first token that differs from the fifth on, None if tokenizers are alike."""
    if tokenize_alike(target, draft):
        return None
    files = [(one.file.definition, one.file_bytes, one.source) for one in (target, draft)]
    names = [token_names(own or convert_sentencepiece(data, source=i)) for own, data, i in files]
    for token in range(_FIRST_COMPARED, num_rows):
        of_target, of_draft = (own.get(token, f"[PAD{token}]") for own in names)
        if of_target != of_draft:
            return f"token {token} is {of_target!r} of the target, {of_draft!r} of the draft"
    return None
