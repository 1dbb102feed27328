"""Shard indices to rows and their order; no torch."""
