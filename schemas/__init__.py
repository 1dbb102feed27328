"""The contract between vocag's parts: what an aligned dataset is on disk, byte by byte."""
