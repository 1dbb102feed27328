"""What can be wrong with a dataset. All are ValueErrors: bad data, never our own bug."""


class DatasetError(ValueError):
    """A dataset, shard or sample breaks the format's rules."""


class SchemaVersionError(DatasetError):
    """Written by another version of the format."""

    def __init__(self, what: str, found: object, expected: int) -> None:
        """Name what was read, the version found there and the one this release reads."""
        super().__init__(
            f"{what} has schema version {found!r}; this release reads version {expected}: "
            "install the matching vocag release or run beam_jobs.align again"
        )


class DamagedSampleError(DatasetError):
    """A sample's bytes are cut, altered or contradict each other."""


class DamagedShardError(DatasetError):
    """A shard's tar or index is missing, cut, altered or not the manifest's."""


class ForeignTokenizerError(DatasetError):
    """A tokenizer is not the one that the dataset was made with."""
