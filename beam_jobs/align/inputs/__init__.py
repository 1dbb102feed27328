"""What align reads: documents of any format, and where each lies."""
