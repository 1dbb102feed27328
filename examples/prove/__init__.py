"""The experiment of docs/evidence.md: `make prove`."""
