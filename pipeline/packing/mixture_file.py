"""A mixture's TOML file: datasets, stages and weights.

    seed = 7
    [datasets.web]
    path = "aligned/web"      # relative to this file, or a URL
    repeat = true
    [datasets.math]
    path = "aligned/math"
    where = "score > 0.5"     # only these documents
    max_epochs = 4
    [[stages]]
    weights = { web = 0.7, math = 0.3 }
    [[stages]]
    from_tokens = 10_000_000_000
    weights = { web = 0.4, math = 0.6 }

Weights are shares of student tokens. Unknown keys are errors: a misspelt one would silently change
the training data.
"""

import math
import os
import re
from codecs import BOM_UTF8
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.command_line.failures import hinted

_TOLERANCE = 1e-6


class MixtureFileError(ValueError):
    """An unreadable or contradictory mixture."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights by name, from `from_tokens` student tokens of a run on, padding excluded."""

    weights: dict[str, float]
    from_tokens: Annotated[int, Meta(ge=0)] = 0


@dataclass(frozen=True)
class MixedDataset:
    """A dataset of a mixture, or a single one, named "".

    `max_epochs` None means endlessly; `where` "" matches all documents.
    """

    name: str
    path: str
    max_epochs: int | None = 1
    where: str = ""


@dataclass(frozen=True)
class Mixture:
    """A mixture's file, in its order, or a single dataset."""

    path: str
    seed: int
    datasets: tuple[MixedDataset, ...]
    stages: tuple[Stage, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The datasets' names; empty for a single dataset."""
        return tuple(entry.name for entry in self.datasets if entry.name)


def read_mixture(path: str | os.PathLike[str]) -> Mixture:
    """Read and check a mixture's file, a path or URL, but not its datasets.

    Raises:
        FileNotFoundError: it is missing.
        MixtureFileError: invalid TOML, keys, weights or stages, or a folder.
    """
    import fsspec  # slow to import, and help needs none

    path = os.fspath(path)
    try:
        with fsspec.open(path, "rb") as file:
            data: bytes = file.read()
    except IsADirectoryError as error:
        raise MixtureFileError(f"{path} is a folder: a mixture is a TOML file") from error
    try:
        entries = msgspec.toml.decode(data.removeprefix(BOM_UTF8), type=_File)
        datasets = tuple(_dataset(path, *item) for item in entries.datasets.items())
        stages = tuple(entries.stages)
        _require_stages(stages, {dataset.name for dataset in datasets})
    except ValueError as error:
        raise _with_nearest_key(MixtureFileError(f"{path}: {error}")) from error
    return Mixture(path, entries.seed, datasets, stages)


_Name = Annotated[str, Meta(min_length=1)]


class _Dataset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1)]
    max_epochs: Annotated[int, Meta(ge=1)] | None = None
    repeat: bool = False
    where: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    datasets: Annotated[dict[_Name, _Dataset], Meta(min_length=1, max_length=65_535)]
    stages: Annotated[list[Stage], Meta(min_length=1)]
    seed: Annotated[int, Meta(ge=0)] = 0


def _with_nearest_key(error: MixtureFileError) -> MixtureFileError:
    from difflib import get_close_matches  # only for an error

    unknown = re.search(r"unknown field `(.+?)`(?: - at `\$\.(\w+))?", str(error))
    if unknown is None:
        return error
    kind = {"stages": Stage, "datasets": _Dataset}.get(unknown[2], _File)
    close = get_close_matches(unknown[1], kind.__struct_fields__, 1)
    return hinted(error, f"{close[0]}  # the nearest key") if close else error


def _dataset(file: str, name: str, entry: _Dataset) -> MixedDataset:
    if entry.repeat and entry.max_epochs is not None:
        raise ValueError(
            f"datasets.{name} has max_epochs {entry.max_epochs} and repeat: choose one"
        )
    path = entry.path
    if "://" not in path:
        folder = file.rpartition("/")[0]
        # A URL's path is joined as text: os.path.join knows no other separator than this system's.
        local = os.path.join(folder, os.path.expanduser(path))
        path = f"{folder}/{path}" if "://" in file else local
    max_epochs = None if entry.repeat else entry.max_epochs or 1
    return MixedDataset(name, path, max_epochs, entry.where.strip())


def _require_stages(stages: tuple[Stage, ...], names: set[str]) -> None:
    if stages[0].from_tokens:
        raise ValueError(f"stage 1 begins at {stages[0].from_tokens} student tokens, not at 0")
    for number, stage in enumerate(stages, 1):
        before = stages[number - 2].from_tokens if number > 1 else -1
        if stage.from_tokens <= before:
            raise ValueError(
                f"stage {number} begins at {stage.from_tokens} student tokens, the stage before it "
                f"at {before}: put stages in order"
            )
        _require_weights(number, stage, names)
    unused = names.difference(*(stage.weights for stage in stages))
    if unused:
        raise ValueError(f"no stage reads {_quoted(unused)}: give a weight, or leave it out")


def _require_weights(number: int, stage: Stage, names: set[str]) -> None:
    unknown = set(stage.weights) - names
    if unknown:
        raise ValueError(
            f"stage {number} names {_quoted(unknown)}, the datasets are {_quoted(names)}"
        )
    for name, weight in stage.weights.items():
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(
                f'stage {number} gives "{name}" the weight {weight}, which must be above 0: leave '
                "out a dataset that the stage doesn't read"
            )
    total = math.fsum(stage.weights.values())
    if abs(total - 1) > _TOLERANCE:
        raise ValueError(
            f"the weights of stage {number} add to {total:g}, not to 1: they are shares of its "
            "student tokens"
        )


def _quoted(names: set[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names))
