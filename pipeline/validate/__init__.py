"""Is every byte of a dataset what it says it is?"""
