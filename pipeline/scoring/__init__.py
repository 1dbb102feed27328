"""A teacher's losses: made, stored, read."""
