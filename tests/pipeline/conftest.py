"""Fixtures of several folders."""

from tests.support.rank_threads import run_ranks as run_ranks
