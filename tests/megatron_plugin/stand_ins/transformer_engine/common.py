"""Recipes of number formats that no test uses."""

from types import SimpleNamespace


class DelayedScaling:
    """A name to subclass."""


recipe = SimpleNamespace(DelayedScaling=DelayedScaling)
