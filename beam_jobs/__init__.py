"""Beam commands that make and enrich datasets."""

from vocag.own_packages import require_own_packages

require_own_packages()  # Beam's workers import this first, and it imports `pipeline` next
