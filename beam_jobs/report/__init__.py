"""What a finished align job tells people: page, card and summary."""
