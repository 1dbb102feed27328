"""Write and read datasets of aligned documents, verified."""
