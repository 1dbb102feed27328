"""`vocag align`: documents in, aligned shards out. Workers import only `steps`."""
