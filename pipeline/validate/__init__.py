"""Check every byte of a dataset."""
