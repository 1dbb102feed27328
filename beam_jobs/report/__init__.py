"""Page, card and summary of an align job."""
