"""From shard indices to rows and their order; no torch."""
