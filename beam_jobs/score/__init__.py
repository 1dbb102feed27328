"""`vocag score`: a teacher's losses, stored next to the shards."""
