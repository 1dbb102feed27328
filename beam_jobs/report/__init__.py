"""What a finished align job shows people: page, card and summary."""
