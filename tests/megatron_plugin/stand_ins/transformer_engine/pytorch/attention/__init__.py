"""Attention's helpers."""
