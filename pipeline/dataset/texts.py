"""The texts of a dataset's documents: kept in their samples, or spelled by their tokens."""

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256

from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.tokenization import Tokenizer
from schemas.document import AlignedDocument, Tokens


def find_text(
    document: AlignedDocument, tokenizers: Mapping[str, Callable[[], Tokenizer]]
) -> bytes | None:
    """Return a document's text.

    Args:
        document: as a sample holds it.
        tokenizers: by side, what gives the tokenizer whose tokens may spell a text that was not
            kept; a side is asked only if the text isn't found before.

    Returns:
        UTF-8 bytes, as kept or with the SHA-256 that the sample says; None where no side spells
        the text.

    Example:
        >>> find_text(document, {"student": lambda: tokenizers.student})  # doctest: +SKIP
        b'Probability, Uncertainty'
    """
    if document.text is not None:
        return document.text
    for side, load in tokenizers.items():
        tokens: Tokens = getattr(document, side)
        text = load().spell_text(tokens.input_ids, tokens.byte_offsets, document.num_text_bytes)
        if text is not None and sha256(text).hexdigest() == document.text_sha256:
            return text
    return None


def text_in(dataset: Dataset, document: AlignedDocument) -> bytes | None:
    """Return a document's text as `find_text` does, by the dataset's own tokenizers."""
    records = {"student": dataset.manifest.student, "teacher": dataset.manifest.teacher}
    load = partial(load_dataset_tokenizer, dataset.location)
    return find_text(document, {side: partial(load, record) for side, record in records.items()})
