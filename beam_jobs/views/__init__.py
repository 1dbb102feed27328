"""`vocag add-teacher` and `vocag add-student`: another tokenizer's view of an aligned dataset."""
