"""SentencePiece models of real families: each hard text is tokenized, and proven by content."""

import random

import pytest
import sentencepiece

from pipeline.tokenization import load_tokenizer
from tests.fuzz.texts import make_text
from tests.support.token_batches import by_document
from tests.support.tokenizer_zoo import SHARED_SENTENCEPIECE, needs_shared

TEXTS = (
    *("⅔ x⁄", "bad \ufffd\ufffd bytes \ufffd", "t\ufeff\ufeff", "a ´ ´b", "\u3000段落\u3000 "),
    *("I'M\r\u200b\xa0\t", " \u1680\x01 ", *(make_text(random.Random(f"{n}")) for n in range(300))),
)


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED_SENTENCEPIECE)
def test_no_hard_text_fails_or_is_condemned(name: str) -> None:
    path = SHARED_SENTENCEPIECE[name]
    tokenizer = load_tokenizer(str(path))
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    data = [text.encode() for text in TEXTS]
    batch = tokenizer.tokenize_batch(data)
    assert not batch.failures
    for text, (ids, ranges) in zip(TEXTS, by_document(batch), strict=True):
        assert ids.tolist() == library.encode(text)
        assert tokenizer.find_unproven(ids, ranges, text.encode()) == []
