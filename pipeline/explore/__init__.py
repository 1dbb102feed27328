"""Show what a dataset contains."""
