"""Check this machine, and what each command lacks."""
