"""Sources of a teacher's losses, imported only for use: asking a server needs no torch."""
