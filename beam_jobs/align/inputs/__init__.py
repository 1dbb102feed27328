"""Input of align: documents of any format, each with its place."""
