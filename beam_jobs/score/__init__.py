"""`vocag score`: a teacher's losses, once, next to the shards."""
