"""Access to stores and the hub that fails quickly."""
