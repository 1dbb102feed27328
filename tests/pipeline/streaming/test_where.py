"""Rows of some documents are the rows of a dataset that holds no others."""

from pathlib import Path

import pytest

from pipeline.dataset.conditions import WhereError
from pipeline.streaming import AlignedRows, Reading, StreamConfig, StreamMismatchError
from tests.pipeline.dataset.test_selection import METADATA, values
from tests.support.datasets import build_dataset, make_texts

pytest.importorskip("duckdb")

WHERE = "good and year < 2030"


def open_rows(folder: Path, where: str = "") -> AlignedRows:
    return AlignedRows(
        StreamConfig(Reading(str(folder), where), seq_length=64, teacher_seq_length=80)
    )


def contents(rows: AlignedRows) -> list[tuple[int, ...]]:
    return sorted(map(tuple, in_order(rows)))


def in_order(rows: AlignedRows) -> list[list[int]]:
    return rows.__getitems__(range(len(rows))).buffer.tolist()


def test_rows_are_those_of_the_documents_alone(tmp_path: Path) -> None:
    texts = make_texts(40)
    build_dataset(tmp_path / "all", texts, metadata=METADATA, values=values)
    some = [pair for number, pair in enumerate(texts) if number % 2 == 0 and number < 30]
    build_dataset(tmp_path / "some", some, metadata=METADATA, values=values)
    rows, alone = open_rows(tmp_path / "all", WHERE), open_rows(tmp_path / "some")
    assert len(rows) == len(alone) > 5
    assert contents(rows) == contents(alone)
    assert rows.datasets[0].num_student_tokens == alone.datasets[0].num_student_tokens
    again = open_rows(tmp_path / "all", f"  {WHERE} ")
    assert in_order(again) == in_order(rows)


def test_a_condition_is_part_of_the_run(tmp_path: Path) -> None:
    build_dataset(tmp_path, metadata=METADATA, values=values)
    whole, some = open_rows(tmp_path), open_rows(tmp_path, "good")
    assert len(whole) > len(some)
    assert some.restore(some.state(3)) == 3
    with pytest.raises(StreamMismatchError, match="made with where good, this run has nothing"):
        whole.restore(some.state(3))
    with pytest.raises(WhereError, match=r"no document of .* is left where year > 3000"):
        open_rows(tmp_path, "year > 3000")
    with pytest.raises(ValueError, match=r"where good is for one dataset, and x\.toml is a"):
        open_rows(Path("x.toml"), "good")
