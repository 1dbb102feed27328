"""Which documents a condition is true of, and what it says where it can't be understood."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.conditions import WhereError
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.groups import count_by
from schemas.manifest import MetadataType
from tests.support.datasets import build_dataset, remove_documents

pytest.importorskip("duckdb")

METADATA: dict[str, MetadataType] = {
    "source": "string",
    "meta.score": "float64",
    "year": "int64",
    "meta.year": "int64",
    "good": "bool",
}


def values(document_id: str) -> tuple[Any, ...]:
    """Return the metadata of document `doc-0-N`, a function of N with some of it missing."""
    number = int(document_id.rpartition("-")[2])
    return (
        ("web", "math", None)[number % 3],
        None if number % 5 == 0 else number / 24,
        2000 + number,
        -number,
        number % 2 == 0,
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("selected")
    build_dataset(folder, metadata=METADATA, values=values)
    return open_dataset(str(folder))


def chosen(dataset: Dataset, where: str) -> set[int]:
    """Return the numbers of the documents that are read."""
    selection, found = select_documents(dataset, where), set()
    for shard, kept in enumerate(selection.each(lambda _, kept: kept)):
        names = dataset.read_index(shard, with_names=True).document_id
        wanted = range(len(names)) if kept is None else np.flatnonzero(kept).tolist()
        found |= {int(names[place].rpartition("-")[2]) for place in wanted}
    return found


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("", lambda n: True),
        ("source == 'web'", lambda n: n % 3 == 0),
        ("source = 'web' and score > 0.5", lambda n: n % 3 == 0 and n % 5 and n > 12),
        ('"meta.score" <= 0.5 or source is null', lambda n: (n % 5 and n <= 12) or n % 3 == 2),
        ("not good", lambda n: n % 2),
        ("YEAR >= 2010 and \"meta.year\" > -12", lambda n: 10 <= n < 12),
        ("source in ('math', 'code')", lambda n: n % 3 == 1),
        ("source like 'm%'", lambda n: n % 3 == 1),
        ("document_id = 'doc-0-7'", lambda n: n == 7),
        ("source <> 'random()'", lambda n: n % 3 < 2),
        ("\"SOURCE\" ilike 'W%' -- random()", lambda n: n % 3 == 0),
        ("nullif(source, 'web') is not null", lambda n: n % 3 == 1),
        ("split_part(document_id, '-', 3)::int between 3 and 5", lambda n: 3 <= n <= 5),
        ("try_cast(document_id as int) is null and year % 2 = 0", lambda n: n % 2 == 0),
        ("coalesce(source, 'none') collate nocase = 'NONE'", lambda n: n % 3 == 2),
        ("case when good then year > 2010 else false end", lambda n: n % 2 == 0 and n > 10),
        ("make_date(year, 1, 1) > date '2019-06-01'", lambda n: n > 19),
    ],
)  # fmt: skip
def test_what_a_condition_is_true_of(dataset: Dataset, where: str, expected: Any) -> None:
    assert chosen(dataset, where) == {number for number in range(24) if expected(number)}


def test_counts_and_quality_are_columns(dataset: Dataset) -> None:
    both = [chosen(dataset, f"num_student_tokens {sign} 100") for sign in ("<", ">=")]
    assert both[0] | both[1] == set(range(24))
    assert all(both)
    assert not both[0] & both[1]
    assert chosen(dataset, "byte_iou_sum <= num_mapped") == set(range(24))
    assert chosen(dataset, "num_teacher_tokens <= num_text_bytes") == set(range(24))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("scor > 1", r'column "scor" not found.*"source" \(string\), "meta.score" \(float64\)'),
        ("source > 3", r"Cannot compare values of type VARCHAR and type INTEGER.*the columns are"),
        ("source ==", r"syntax error"),
        ("year", r"it is a value of type BIGINT, not a condition"),
        ("random() < 0.5", r"random differs each time"),
        ('"random"() < 0.5', r"random differs each time"),
        ('year > 3 and ("RANDOM"()) < 0.5', r"random differs each time"),
        ("system.main.random() < 0.5", r'column "main.random" not found'),
        ("uuid() > source", r"uuid differs each time"),
        ("current_date > '2024-01-01'", r'column "current_date" not found'),
        ("current_timestamp > '2024-01-01'", r'column "current_timestamp" not found'),
        ("current_localtime() > '04:00'", r"current_localtime differs each time"),
        ("age(make_date(year, 1, 1)) > interval 5 year", r"age differs each time"),
        ("date_add(make_date(year, 1, 1), ago(interval 5 year)) is null", r'"current_timestamp"'),
        ("pg_conf_load_time() is not null", r'column "current_timestamp" not found'),
        ("sum(year) > 3", r"sum isn't a function of one document's values"),
        ("unnest([year]) > 3", r"unnest isn't a function of one document's values"),
        ("row_number() over () > 3", r"it holds a window"),
        ("source = (select column0 from read_csv('/etc/hostname'))", r"it holds a subquery"),
        ("(select i from range(9) t(i) using sample 1) > 3", r"it holds a subquery"),
        ("year = any([2001, 2002])", r"it holds a subquery"),
        ("columns(*) > 3", r"it holds a star"),
        ("#1 > 3", r"it holds a positional reference"),
        ("? > 3", r"it holds a parameter"),
        ('"place in the index" < 4', r'column "place in the index" not found'),
        ('"place in the index".abs() < 4', r'"place in the index.abs" not found.*write f\(x\)'),
        ("rowid < 4", r'column "rowid" not found'),
        ("meta.score > 0.5", r'column "meta.score" not found; put a name with dots in double'),
        ("true); drop table x; select (true", r"Parser Error"),
    ],
)
def test_what_can_not_be_understood(dataset: Dataset, where: str, message: str) -> None:
    with pytest.raises(WhereError, match=message):
        select_documents(dataset, where)


def test_a_value_that_can_not_be_converted(dataset: Dataset) -> None:
    with pytest.raises(WhereError, match=r"^where 'cast.*': Conversion Error: .*; try_cast make"):
        chosen(dataset, "cast(document_id as int) > 3")


def test_times_with_a_zone_are_the_same_everywhere(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "extract(hour from timestamptz '2020-01-01 12:00:00+00') = 12 and good"
    for zone in ("America/New_York", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert chosen(dataset, where) == set(range(0, 24, 2))
    monkeypatch.undo()
    time.tzset()


def test_a_name_with_quotes_is_a_column(tmp_path: Path) -> None:
    build_dataset(tmp_path, metadata={'a"b': "int64"}, values=lambda name: (int(name[6:]),))
    assert chosen(open_dataset(str(tmp_path)), '"a""b" < 5') == set(range(5))


def test_removed_documents_are_left_out(tmp_path: Path) -> None:
    build_dataset(tmp_path, metadata=METADATA, values=values)
    remove_documents(tmp_path, "doc-0-3", "doc-0-8")
    rest = open_dataset(str(tmp_path))
    assert chosen(rest, "") == set(range(24)) - {3, 8}
    assert chosen(rest, "good") == set(range(0, 24, 2)) - {8}
    assert sum(group.num_documents for group in count_by(rest, "good")) == 22
