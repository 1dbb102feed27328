"""Conditions in a mixture: parts of datasets are mixed like whole ones, or refused."""

import shutil
from pathlib import Path

import pytest
import torch

from pipeline.dataset.conditions import WhereError
from pipeline.explore.mixture import PlannedMixture, describe_mixture, plan_mixture_rows
from pipeline.packing.mixture_file import MixtureFileError
from pipeline.packing.opening import open_run
from pipeline.packing.rules import PackingRules
from pipeline.streaming import AlignedRows, Reading, StreamConfig, StreamMismatchError
from schemas.errors import DatasetError
from tests.pipeline.dataset.test_selection import METADATA, values
from tests.support.datasets import build_dataset, make_texts
from tests.support.growing import grow

pytest.importorskip("duckdb")

LENGTHS = {"seq_length": 64, "teacher_seq_length": 80}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets; the documents of one are good where their number is even."""
    folder = tmp_path_factory.mktemp("parts")
    build_dataset(folder / "web", make_texts(40), metadata=METADATA, values=values)
    build_dataset(folder / "math", make_texts(20, seed=3), metadata=METADATA, values=values)
    return folder


def write_mixture(folder: Path, first: str, second: str, *, path: str = "web") -> Path:
    """Mix two parts of one dataset, half and half, or a part of each of two."""
    file = folder / "mixture.toml"
    file.write_text(
        f"""
        [datasets.first]
        path = "web"
        {first}
        max_epochs = 2
        [datasets.second]
        path = "{path}"
        {second}
        [[stages]]
        weights = {{ first = 0.5, second = 0.5 }}
        """
    )
    return file


def open_mixture(folder: Path, first: str, second: str, *, path: str = "web") -> AlignedRows:
    """Open such a mixture."""
    file = write_mixture(folder, first, second, path=path)
    return AlignedRows(StreamConfig(Reading(str(file)), **LENGTHS))


def plan_mixture(file: str) -> PlannedMixture:
    """Plan its rows, as explore does."""
    opened = open_run(Reading(file))
    return plan_mixture_rows(opened, PackingRules.of_dataset(opened.manifest, **LENGTHS))


def test_rows_of_a_part_are_those_of_the_dataset_read_with_the_condition(folder: Path) -> None:
    rows = open_mixture(folder, "where = 'good and year < 2030'", "where = 'not good'")
    whole = AlignedRows(StreamConfig(Reading(str(folder / "web")), **LENGTHS))
    parts = [
        AlignedRows(StreamConfig(Reading(str(folder / "web"), where), num_epochs=2, **LENGTHS))
        for where in ("good and year < 2030", "not good")
    ]
    assert sum(part.samples_per_epoch for part in parts) < whole.samples_per_epoch
    seen = [0, 0]
    for position in range(len(rows)):
        row = rows[position]
        source = int(row["source"])
        own = parts[source][seen[source]]
        for field in ("input_ids", "labels", "teacher_input_ids", "teacher_spans"):
            assert torch.equal(row[field], own[field])
        seen[source] += 1
    assert seen == [2 * parts[0].samples_per_epoch, parts[1].samples_per_epoch]


@pytest.mark.parametrize("where", ["", "where = 'good'"])
def test_two_generations_of_one_dataset_are_refused(tmp_path: Path, where: str) -> None:
    """A copy of the older one beside the newer: whatever the conditions, shards are shared."""
    grow(tmp_path / "grown", "a", ["a1", "a2", "a3"])
    shutil.copytree(tmp_path / "grown/aligned", tmp_path / "web")
    grow(tmp_path / "grown", "b", ["b1"])
    where = where.replace("good", "source is not null")
    with pytest.raises(
        DatasetError, match=r'"first" and "second" share \d+ shards, such as corpus'
    ):
        open_mixture(tmp_path, where, where, path="grown/aligned")


def test_a_condition_is_part_of_the_mixture(folder: Path) -> None:
    saved = open_mixture(folder, "where = 'good'", "", path="math").state(3)
    assert open_mixture(folder, "where = ' good '", "", path="math").restore(saved) == 3
    for first, second in (
        ("", ""),
        ("where = 'year < 2030'", ""),
        ("where = 'good'", "where='good'"),
    ):
        with pytest.raises(StreamMismatchError, match="made with fingerprint"):
            open_mixture(folder, first, second, path="math").restore(saved)


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        (
            "where = 'good'",
            "",
            DatasetError,
            r'"first" and "second" share 3 shards.*each with a',
        ),
        (
            "where = 'good'",
            "where = 'year < 2030'",
            DatasetError,
            r'"first" \(where good\) and "second" \(where year < 2030\) .* share \d+ documents',
        ),
        (
            "where = 'rating > 3'",
            "where = 'good'",
            WhereError,
            r'mixture.toml: "first": where rating > 3: .*the columns are "source" \(string\)',
        ),
        ("where = 'year'", "where = 'good'", WhereError, r'"first": where year: .* no condition'),
        (
            "where = 'year > 3000'",
            "where = 'year < 2030'",
            WhereError,
            r"no document of .*web is left where year > 3000",
        ),
        ("where = 3", "", MixtureFileError, r"Expected `str`, got `int` - at `\$\.datasets"),
    ],
)
def test_conditions_that_can_t_be_used_are_refused_before_any_row_is_read(
    folder: Path, first: str, second: str, error: type[Exception], message: str
) -> None:
    file = str(write_mixture(folder, first, second))
    with pytest.raises(error, match=message):
        AlignedRows(StreamConfig(Reading(file), **LENGTHS))
    with pytest.raises(error, match=message):
        plan_mixture(file)


def test_the_plan_of_a_mixture_tells_its_conditions(folder: Path) -> None:
    file = write_mixture(folder, "where = 'good'", "where = 'not good'")
    planned = plan_mixture(str(file))
    rows = AlignedRows(StreamConfig(Reading(str(file)), **LENGTHS))
    assert planned.num_rows == len(rows)
    lines = list(describe_mixture(planned, global_batch_size=1))
    assert lines[1:3] == ["first: where good", "second: where not good"]
