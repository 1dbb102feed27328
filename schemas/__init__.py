"""The format of an aligned dataset on disk, shared by vocag's parts."""
