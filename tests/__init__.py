"""Tests; a package, so that no installed distribution's `tests` hides it."""
