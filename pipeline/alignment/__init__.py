"""Align two tokenizations of a text, token by token (Algorithm 1)."""

from pipeline.alignment.token_spans import AlignmentError, align_batch, align_tokens

__all__ = ["AlignmentError", "align_batch", "align_tokens"]
