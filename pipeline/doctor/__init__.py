"""Check this machine, and what commands lack."""
