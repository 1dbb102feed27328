"""Take documents out of a finished dataset, and write it anew without them."""
