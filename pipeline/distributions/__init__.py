"""A teacher's distributions in the student's vocabulary; no torch."""
