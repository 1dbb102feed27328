"""Text to tokens that know their bytes, with any tokenizer."""

from pipeline.tokenization.sources import TokenizerError
from pipeline.tokenization.tokenizer import PROBES, SpecialStrings, Tokenizer, load_tokenizer

__all__ = ["PROBES", "SpecialStrings", "Tokenizer", "TokenizerError", "load_tokenizer"]
