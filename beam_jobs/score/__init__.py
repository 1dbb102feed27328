"""`vocag score`: a teacher's losses, once, beside the shards."""
