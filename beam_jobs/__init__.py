"""Apache Beam commands that make and enrich aligned datasets."""
