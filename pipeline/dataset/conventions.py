"""The tokens around a text: the user's or the tokenizers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.dataset.files import Dataset
from schemas.manifest import ConventionRecord, Manifest, TokenizerRecord

if TYPE_CHECKING:  # only a user's token needs a tokenizer
    from pipeline.dataset.tokenizers import Side
    from pipeline.tokenization import Tokenizer

NOTHING = "none"
"""A user's word for no token."""


def choose_conventions(
    dataset: Dataset,
    *,
    student_bos: str | None = None,
    student_eos: str | None = None,
    teacher_context: str | None = None,
) -> Manifest:
    """Return a dataset's manifest with other tokens around its texts.

    Each is a token, its id or "none"; None keeps the dataset's. `student_bos` and `teacher_context`
    go before a text, `student_eos` after a document. ValueError for an unknown token.
    """

    def of_side(side: Side, before: str | None, after: str | None) -> TokenizerRecord:
        record: TokenizerRecord = getattr(dataset.manifest, side)
        if before is None and after is None:
            return record

        def load() -> Tokenizer:
            from pipeline.dataset.tokenizers import load_dataset_tokenizer

            return load_dataset_tokenizer(dataset, side)

        own = name_tokens(record.around_text, load, before=before, after=after)
        return replace(record, convention=own)

    student = of_side("student", student_bos, student_eos)
    teacher = of_side("teacher", teacher_context, None)
    return replace(dataset.manifest, student=student, teacher=teacher)


def describe_tokenizer(
    tokenizer: Tokenizer, folder: str, *, before: str | None = None, after: str | None = None
) -> TokenizerRecord:
    """Return the manifest's record of a tokenizer copied to a folder."""
    return TokenizerRecord(
        source=tokenizer.source,
        file=f"{folder}/{tokenizer.file_name}",
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        special_strings=tokenizer.special_strings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        adds_bos=tokenizer.adds_bos,
        adds_eos=tokenizer.adds_eos,
        convention=name_tokens(
            tokenizer.around_text, lambda: tokenizer, before=before, after=after
        ),
    )


def name_tokens(
    own: ConventionRecord,
    load: Callable[[], Tokenizer],
    *,
    before: str | None = None,
    after: str | None = None,
) -> ConventionRecord:
    """Override a convention as `choose_conventions` does; `load` runs only to find a token."""
    first, continued, end = own.first_token_id, own.continued_token_id, own.end_token_id
    if before is not None:
        first = continued = _find(before, load)
    if after is not None:
        end = _find(after, load)
    return ConventionRecord(first, continued, end)


def describe_convention(record: TokenizerRecord, tokenizer: Tokenizer) -> str:
    """Describe the tokens around a text."""
    own = record.around_text
    before, after = (_describe(i, tokenizer) for i in (own.first_token_id, own.end_token_id))
    return f"{before} before a text, {after} after it"


def _find(name: str, load: Callable[[], Tokenizer]) -> int | None:
    return None if name == NOTHING else load().find_token(name)


def _describe(token_id: int | None, tokenizer: Tokenizer) -> str:
    return "nothing" if token_id is None else f"{tokenizer.token_name(token_id)} ({token_id})"
