"""A fuzzer: hurtful texts, commands with faults, flipped bits. `python -m tests.fuzz --help`."""
