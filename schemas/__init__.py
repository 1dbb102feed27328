"""The contract between vocag's parts: an aligned dataset on disk, byte by byte."""
