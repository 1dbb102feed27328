"""Rows of some documents, alone or in a mixture, are those of a dataset that holds no others."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.dataset.conditions import WhereError
from pipeline.dataset.files import open_dataset
from pipeline.explore.mixture import PlannedMixture, describe_mixture, plan_mixture_rows
from pipeline.packing.opening import open_run
from pipeline.packing.rules import PackingRules
from pipeline.streaming import AlignedRows, Reading, StreamConfig, StreamMismatchError
from schemas.errors import DatasetError
from schemas.manifest import MANIFEST_FILE, encode_manifest
from tests.pipeline.dataset.test_chosen_documents import METADATA, values
from tests.support.datasets import build_dataset, make_texts
from tests.support.mixtures import write_mixture

pytest.importorskip("duckdb")

LENGTHS = {"seq_length": 64, "teacher_seq_length": 80}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets; the documents of one are good where their number is even."""
    folder = tmp_path_factory.mktemp("parts")
    build_dataset(folder / "web", make_texts(40), metadata=METADATA, values=values)
    build_dataset(folder / "math", make_texts(20, seed=3), metadata=METADATA, values=values)
    return folder


def test_rows_are_those_of_the_documents_alone(folder: Path, tmp_path: Path) -> None:
    texts = make_texts(40)
    some = [pair for number, pair in enumerate(texts) if number % 2 == 0 and number < 30]
    build_dataset(tmp_path / "some", some, metadata=METADATA, values=values)
    rows = open_rows(folder / "web", "good and year < 2030")
    alone = open_rows(tmp_path / "some")
    assert len(rows) == len(alone) > 5
    contents, expected = (read.__getitems__(range(len(alone))).buffer for read in (rows, alone))
    assert sorted(contents.tolist()) == sorted(expected.tolist())
    assert rows.datasets[0].num_student_tokens == alone.datasets[0].num_student_tokens
    again = open_rows(folder / "web", "  good and year < 2030 ")
    assert torch.equal(again.__getitems__(range(len(rows))).buffer, contents)


def test_a_condition_is_part_of_the_run(folder: Path) -> None:
    whole, some = open_rows(folder / "web"), open_rows(folder / "web", "good")
    assert some.restore(some.state(3)) == 3
    with pytest.raises(StreamMismatchError, match="made with where good, this run has nothing"):
        whole.restore(some.state(3))
    with pytest.raises(ValueError, match=r"where good is for one dataset, and x\.toml is a"):
        open_rows(Path("x.toml"), "good")


def mix_two(folder: Path, first: str, second: str, *, path: str = "web") -> Path:
    """Mix two parts of one dataset, half and half, or a part of each of two."""
    return write_mixture(
        folder / "mixture.toml",
        first={"path": "web", "where": first, "max_epochs": 2},
        second={"path": path, "where": second},
    )


def open_rows(path: Path, where: str = "", num_epochs: int = 1) -> AlignedRows:
    return AlignedRows(StreamConfig(Reading(str(path), where), num_epochs=num_epochs, **LENGTHS))


def open_mixture(folder: Path, first: str, second: str, *, path: str = "web") -> AlignedRows:
    return open_rows(mix_two(folder, first, second, path=path))


def plan_mixture(file: Path) -> PlannedMixture:
    """Plan its rows, as explore does."""
    opened = open_run(Reading(str(file)))
    return plan_mixture_rows(opened, PackingRules.of_dataset(opened.manifest, **LENGTHS))


def test_rows_of_a_part_are_those_of_the_dataset_read_with_the_condition(folder: Path) -> None:
    rows = open_mixture(folder, "good and year < 2030", "not good")
    conditions = ("good and year < 2030", "not good")
    parts = [open_rows(folder / "web", where, num_epochs=2) for where in conditions]
    seen = [0, 0]
    for position in range(len(rows)):
        row = rows[position]
        source = int(row["source"])
        own = parts[source][seen[source]]
        for field in ("input_ids", "labels", "teacher_input_ids", "teacher_spans"):
            assert torch.equal(row[field], own[field])
        seen[source] += 1
    assert seen == [2 * parts[0].samples_per_epoch, parts[1].samples_per_epoch]


@pytest.mark.parametrize("where", ["", "good"])
def test_two_generations_of_one_dataset_are_refused(
    folder: Path, tmp_path: Path, where: str
) -> None:
    """The older one next to the newer: whatever the conditions, shards are shared."""
    for name, num_shards in (("web", 3), ("older", 2)):
        shutil.copytree(folder / "web", tmp_path / name)
        manifest = open_dataset(folder / "web").manifest
        part = replace(manifest, shards=manifest.shards[:num_shards])
        (tmp_path / name / MANIFEST_FILE).write_bytes(encode_manifest(part))
    with pytest.raises(DatasetError, match='"first" and "second" share 2 shards, such as docs'):
        open_mixture(tmp_path, where, where, path="older")


def test_a_condition_is_part_of_the_mixture(folder: Path) -> None:
    saved = open_mixture(folder, "good", "", path="math").state(3)
    assert open_mixture(folder, " good ", "", path="math").restore(saved) == 3
    for first, second in (("", ""), ("year < 2030", ""), ("good", "good")):
        with pytest.raises(StreamMismatchError, match="made with fingerprint"):
            open_mixture(folder, first, second, path="math").restore(saved)


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        ("good", "", DatasetError, r'"first" and "second" share 3 shards.*each with a'),
        (
            "good",
            "year < 2030",
            DatasetError,
            r"where good.*where year < 2030.* share \d+ documents",
        ),
        ("rating > 3", "good", WhereError, r'toml: "first": where .rating > 3.: .*the columns are'),
        ("year > 3000", "good", WhereError, r"no document of .*web matches year > 3000"),
    ],
)
def test_conditions_that_can_t_be_used_are_refused_before_any_row_is_read(
    folder: Path, first: str, second: str, error: type[Exception], message: str
) -> None:
    file = mix_two(folder, first, second)
    for read in (open_rows, plan_mixture):
        with pytest.raises(error, match=message):
            read(file)


def test_the_plan_of_a_mixture_tells_its_conditions(folder: Path) -> None:
    file = mix_two(folder, "good", "not good")
    planned = plan_mixture(file)
    assert planned.num_rows == len(open_rows(file))
    lines = list(describe_mixture(planned, global_batch_size=1))
    assert lines[1:3] == ["first: where good", "second: where not good"]
