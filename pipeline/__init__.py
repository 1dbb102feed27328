"""The library: tokenize, align, pack, stream, guide, validate."""
