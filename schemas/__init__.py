"""The contract between the parts: what an aligned dataset is on disk, byte by byte."""
