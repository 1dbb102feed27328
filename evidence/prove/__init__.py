"""The experiment of evidence/README.md: `make prove`."""
