"""A fuzzer: tokenizers by hurtful texts, then commands by faults. `python -m tests.fuzz --help`."""
