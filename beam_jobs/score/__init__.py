"""`vocag score`: compute a teacher's losses once and store them next to the shards."""
