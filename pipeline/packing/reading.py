"""What a run reads: of which data, in which state, and the tokens around a text."""

from dataclasses import dataclass
from typing import Literal

from pipeline.packing.mixture_file import Mixture, is_mixture, mixture_of_one, read_mixture

Generation = int | Literal["latest"] | None

LATEST: Literal["latest"] = "latest"
"""The newest generation, also for a run that was started on another."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What to read.

    Attributes:
        path: a dataset's folder or manifest, or a mixture's .toml file; a path, or a URL that
            `fsspec` reads.
        where: read those documents only that this is true of, such as "language == 'en' and score >
            0.5", see `pipeline.dataset.selection`; "" reads all. Not of a mixture, whose file says
            it of each dataset.
        generation: which state of a dataset that grows is read: its number (not of a mixture), or
            "latest", to which a run that goes on then moves; None: the one on which the run was
            started, the newest of a new run.
        student_bos: stands before a student's text: a token's name or id, or "none"; None takes
            the dataset's.
        student_eos: stands after a document's last student token, likewise.
        teacher_context: stands before a teacher's text, likewise.

    Raises:
        ValueError: a condition or a generation's number of a mixture.
    """

    path: str
    where: str = ""
    generation: Generation = None
    student_bos: str | None = None
    student_eos: str | None = None
    teacher_context: str | None = None

    def __post_init__(self) -> None:
        """Check what a mixture's file says by dataset."""
        if self.where.strip() and is_mixture(self.path):
            raise ValueError(
                f"where {self.where.strip()} is of one dataset, and {self.path} a mixture of "
                'several: give its datasets a "where" there'
            )
        if isinstance(self.generation, int) and is_mixture(self.path):
            raise ValueError(
                f"generation {self.generation} is of one dataset, and {self.path} a mixture of "
                f'several: leave it out, or write "{LATEST}"'
            )

    def mixture(self, *, seed: int = 0, max_epochs: int | None = 1) -> Mixture:
        """Return the mixture that is read: what its file says, or a dataset by itself.

        Args:
            seed: of a dataset's order; a mixture's file says its own.
            max_epochs: of a dataset, likewise.

        Raises:
            MixtureFileError: a file that can't be read, or contradicts itself.
        """
        if is_mixture(self.path):
            return read_mixture(self.path)
        return mixture_of_one(self.path, seed=seed, max_epochs=max_epochs, where=self.where)


def parse_generation(text: str) -> Generation:
    """Return a generation as an option names it.

    Raises:
        ValueError: neither a number nor "latest"; "" is None.

    Example:
        >>> parse_generation("3"), parse_generation("latest"), parse_generation("")
        (3, 'latest', None)
    """
    if text == LATEST:
        return LATEST
    if text and not text.isdecimal():
        raise ValueError(f'generation "{text}" is neither a number nor "{LATEST}"')
    return int(text) if text else None
