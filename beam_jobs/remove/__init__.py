"""`vocag remove`."""
