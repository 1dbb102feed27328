"""`vocag align`: documents in, verified aligned shards out. Workers import only `steps`."""
