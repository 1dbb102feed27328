"""Mixture files: strictly read, each mistake a message that says what to change."""

import re
from pathlib import Path

import pytest

from pipeline.command_line.failures import hints_of
from pipeline.dataset.dataset_reading import read_manifest
from pipeline.packing.mixture_file import (
    MixedDataset,
    Mixture,
    MixtureFileError,
    Stage,
    read_mixture,
)
from schemas.errors import DatasetError

WORKING = """
seed = 7
[datasets.web]
path = "aligned/web"
repeat = true
[datasets.math]
path = "/data/math"
max_epochs = 4
[datasets.code]
path = "gs://bucket/code"
[[stages]]
weights = { web = 0.7, math = 0.3 }
[[stages]]
from_tokens = 10_000_000_000
weights = { web = 0.4, math = 0.4, code = 0.2 }
"""


@pytest.fixture
def read(tmp_path):
    """Write a mixture with one text exchanged, and read it."""

    def read_changed(old, new):
        assert WORKING.count(old) >= 1
        (tmp_path / "mixture.toml").write_text(WORKING.replace(old, new, 1))
        return read_mixture(tmp_path / "mixture.toml")

    return read_changed


def test_a_mixture_is_read(read, tmp_path):
    assert read("7", "7") == Mixture(
        str(tmp_path / "mixture.toml"),
        7,
        (
            MixedDataset("web", str(tmp_path / "aligned/web"), None),
            MixedDataset("math", "/data/math", 4),
            MixedDataset("code", "gs://bucket/code", 1),
        ),
        (
            Stage({"web": 0.7, "math": 0.3}),
            Stage({"web": 0.4, "math": 0.4, "code": 0.2}, 10_000_000_000),
        ),
    )


def test_paths_are_relative_to_the_file_even_where_that_is_a_url(tmp_path):
    (tmp_path / "mixture.toml").write_text(WORKING)
    mixture = read_mixture(f"file://{tmp_path}/mixture.toml")
    assert mixture.datasets[0].path == f"file://{tmp_path}/aligned/web"


def test_the_home_folder_is_found_from_any_file(read, monkeypatch):
    """It was only where the file was named without a folder."""
    monkeypatch.setenv("HOME", "/home/me")
    assert read("/data/math", "~/math").datasets[1].path == "/home/me/math"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 7", "sede = 7", r"unknown field `sede`"),
        ("from_tokens", "tokens", r"unknown field `tokens` - at `\$.stages"),
        ("max_epochs = 4", "max_epochs = 0", r"Expected `int` >= 1"),
        ("max_epochs = 4", "max_epochs = 4\nrepeat = true", r"datasets.math has max_epochs 4 and"),
        ('path = "/data/math"', "", r"missing required field `path`"),
        ("seed = 7", "seed = ", r"Invalid value \(at line 2, column 8\)"),
        ("math = 0.3", "math = 0.0", r'stage 1 gives "math" the weight 0.0, which must be above 0'),
        ("math = 0.3", "math = nan", r"the weight nan"),
        ("math = 0.3", "math = 0.2", r"weights of stage 1 add to 0.9, not to 1"),
        ("math = 0.3", "maths = 0.3", r'stage 1 names "maths", the datasets are "code", "math", '),
        ("math = 0.4, code = 0.2", "math = 0.6", r'no stage reads "code": give a weight'),
        ("10_000_000_000", "0", r"stage 2 begins at 0 student tokens, the stage before it at 0"),
        ("[[stages]]", "[[stages]]\nfrom_tokens = 5", r"stage 1 begins at 5 student tokens, not"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(read, old, new, message):
    with pytest.raises(MixtureFileError, match=f"^/.*mixture.toml: (?s:.*){message}"):
        read(old, new)


def test_a_file_without_datasets_or_stages_is_refused(tmp_path):
    file = tmp_path / "mixture.toml"
    for text in ("", "datasets = {}\nstages = []", re.sub(r"(?s)\[\[.*", "stages = []", WORKING)):
        file.write_text(text)
        with pytest.raises(MixtureFileError, match=r"datasets|stages"):
            read_mixture(file)


def test_a_byte_order_mark_is_no_part_of_a_mixture(tmp_path):
    text = '[datasets.a]\npath = "a"\n[[stages]]\nweights = { a = 1.0 }\n'
    (tmp_path / "m.toml").write_text(text, "utf-8-sig")
    assert [dataset.name for dataset in read_mixture(tmp_path / "m.toml").datasets] == ["a"]


def test_a_folder_and_a_dataset_that_is_a_file_are_named(tmp_path):
    (tmp_path / "m.toml").mkdir()
    with pytest.raises(MixtureFileError, match=r"m\.toml is a folder: a mixture is a TOML file"):
        read_mixture(tmp_path / "m.toml")
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(DatasetError, match=r"a\.jsonl is a file, not a dataset: name the folder"):
        read_manifest(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ('sede = 7\n[datasets.a]\npath = "d"', "seed"),
        ('[datasets.a]\npath = "d"\nrepaet = true', "repeat"),
        ('[datasets.a]\npath = "d"\n[[stages]]\nwieghts = { a = 1.0 }', "weights"),
    ],
)
def test_a_misspelt_key_gets_the_nearest(tmp_path: Path, misspelt: str, right: str) -> None:
    file = tmp_path / "mixture.toml"
    file.write_text(misspelt)
    with pytest.raises(MixtureFileError, match="unknown field") as refused:
        read_mixture(file)
    assert hints_of(refused.value) == [f"hint: {right}  # the nearest key"]
