"""Results of an align job for people: page, card and summary."""
