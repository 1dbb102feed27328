"""A tokenizer is refused for what it does to plain text, and for nothing else."""

from pathlib import Path

import pytest

from pipeline.tokenization import PROBES, TokenizerError, load_tokenizer
from tests.support.tokenizer_zoo import definition, load, write_definition


def test_one_that_loses_letters_of_plain_text_is_refused_with_the_text(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": False}
    body = definition("gpt2_like")
    steps = {"type": "Sequence", "pretokenizers": [split, body["pre_tokenizer"]]}
    path = write_definition(body | {"pre_tokenizer": steps}, tmp_path)
    plain = r'on the plain text "The quick brown fox .*" its offsets leave 1 of 44 bytes uncovered'
    with pytest.raises(TokenizerError, match=plain):
        load_tokenizer(str(path))


@pytest.mark.parametrize("name", ["sentencepiece_unknown", "sentencepiece_suffix"])
def test_no_probe_fails_a_sentencepiece_model(name: str) -> None:
    assert not load(name).tokenize_batch([probe.encode() for probe in PROBES]).failures
