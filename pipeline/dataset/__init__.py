"""Aligned batches to files and back, verified; read by file, so that reading loads no tokenizer."""
