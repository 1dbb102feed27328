"""`vocag align`: documents in, verified aligned shards out; a worker imports `steps` alone."""
