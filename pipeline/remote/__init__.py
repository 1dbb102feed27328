"""Stores and the hub, asked once and not for long."""
