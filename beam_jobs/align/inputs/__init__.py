"""Input of align: documents and their places."""
