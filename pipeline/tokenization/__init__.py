"""Tokenize text with any tokenizer, with each token's bytes."""

from pipeline.tokenization.hard_texts import PROBES
from pipeline.tokenization.sources import TokenizerError
from pipeline.tokenization.tokenizer import SpecialStrings, Tokenizer, load_tokenizer

__all__ = ["PROBES", "SpecialStrings", "Tokenizer", "TokenizerError", "load_tokenizer"]
