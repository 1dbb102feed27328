"""Options for a run's data and the tokens around texts."""

import os
from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.command_line.option_parsing import Condition, Option, TokenName
from pipeline.packing.mixture_file import MixedDataset, Mixture, Stage, read_mixture

Generation = int | Literal["latest"] | None

LATEST: Literal["latest"] = "latest"
"""The newest generation, also for a run that was started on another."""


def parse_generation(text: str) -> Generation:
    """Parse an option's generation; ArgumentTypeError if it is invalid."""
    if text == LATEST:
        return LATEST
    if not text.isdecimal():
        raise ArgumentTypeError(f'"{text}" is neither a number nor "{LATEST}"')
    return int(text)


@dataclass(frozen=True)
class Reading:
    """What to read, declared once for every command that reads rows.

    Attributes:
        path: folder, URL or manifest of an aligned dataset, or a mixture's FILE.toml.
        where: read only documents that match, such as "language == 'en' and score > 0.5"; any
            condition of DuckDB over their metadata (default: all; a mixture's file has its own).
        generation: generation of a growing dataset, by number; latest moves a resumed run to the
            newest (default: the newest; a resumed run keeps its own).
        student_bos: token before a student's text, its id, or none (default: the dataset's).
        student_eos: token after a student's document, its id, or none (default: the dataset's).
        teacher_context: token before a teacher's text, its id, or none (default: the dataset's).

    Example:
        >>> Reading("aligned", where="score > 0.5").mixture().datasets[0].where
        'score > 0.5'
    """

    path: Annotated[str, Option("DATASET", form="itself")]
    where: Condition = ""
    generation: Annotated[Generation, Option("N", read=parse_generation)] = None
    student_bos: TokenName | None = None
    student_eos: TokenName | None = None
    teacher_context: TokenName | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        for name in ("student_bos", "student_eos", "teacher_context"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(value))  # an id may be a number

    def mixture(self, *, seed: int = 0, max_epochs: int | None = 1) -> Mixture:
        """Return the content of a mixture's file, or a mixture of one unnamed dataset.

        Raises:
            MixtureFileError: the file is invalid.
            ValueError: a condition or a generation's number with a mixture.
        """
        if not self.path.endswith(".toml") or os.path.isdir(self.path):
            entry = MixedDataset("", self.path, max_epochs, self.where.strip())
            return Mixture(self.path, seed, (entry,), (Stage({"": 1.0}),))
        if self.where.strip():
            raise ValueError(
                f"where {self.where.strip()} is for one dataset, and {self.path} is a mixture: "
                'give its datasets a "where" there'
            )
        if isinstance(self.generation, int):
            raise ValueError(
                f"generation {self.generation} is for one dataset, and {self.path} is a mixture: "
                f'leave it out, or write "{LATEST}"'
            )
        return read_mixture(self.path)
