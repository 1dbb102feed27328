"""Errors of datasets, all ValueErrors: bad data, never our own bug."""

from typing import Any

RESTORE = "restore it, or delete the dataset and run vocag align again"
"""The remedy of damage. A finished job whose dataset is still there would do nothing."""


class DatasetError(ValueError):
    """A dataset, shard or sample breaks the format's rules."""


class SchemaVersionError(DatasetError):
    """A file of another version of the format."""

    def __init__(
        self, what: str, found: object, expected: int, *, job: str = "vocag align"
    ) -> None:
        """Take the file, the versions found and expected, and the writing job."""
        super().__init__(
            f"{what} has schema version {found!r}; this release reads version {expected}: "
            f"install the matching vocag release or run {job} again"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Let it pass between processes, with the message alone."""
        return self.__class__.__new__, (self.__class__, *self.args), self.__dict__


class DamagedSampleError(DatasetError):
    """A sample's bytes are cut, altered or contradict each other."""


class DamagedShardError(DatasetError):
    """A shard's tar or index is missing, cut, altered or differs from the manifest."""


class ForeignTokenizerError(DatasetError):
    """A tokenizer didn't make the dataset."""


class ForeignLossesError(DatasetError):
    """A teacher's losses are incomplete, or of other data, another teacher or context rule."""
