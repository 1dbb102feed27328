"""Metadata from the input to the index: types, misfits, and every format alike."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_jobs.align.command import align
from beam_jobs.align.inputs.documents import MetadataField, UnusableError
from beam_jobs.align.inputs.metadata import fit_value, parse_metadata, settle_columns
from beam_jobs.align.opened_input import reading_rules
from beam_jobs.align.options import AlignOptions
from beam_jobs.job_errors import InputError, OptionsError
from pipeline.dataset.files import open_dataset
from pipeline.dataset.groups import count_by
from pipeline.explore.command import main as explore
from pipeline.validate.dataset_checks import validate_dataset
from schemas.manifest import MetadataColumn, MetadataType
from tests.support.datasets import byte_level

FIELDS = "source,meta.score,year,good"
TYPED = "source:string,meta.score:float64,year:int64,good:bool"
COLUMNS = tuple(MetadataColumn(*each.split(":")) for each in TYPED.split(","))  # type: ignore[arg-type]
ROWS: dict[str, tuple[Any, ...]] = {
    "a": ("web", 0.5, 2024, True),
    "b": ("数学", 1.0, None, False),
    "c": (None, None, -7, None),
    "d": ("web", 1e-9, (1 << 53) + 1, True),
}


def options(folder: Path, pattern: str, **changes: Any) -> AlignOptions:
    """Return options with small tokenizers; the output is named after the pattern."""
    sides = {}
    for side, size in (("student", 400), ("teacher", 480)):
        path = folder / side / "tokenizer.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(byte_level(size).file_bytes)
        sides[side] = str(path)
    output = str(folder / f"out-{pattern}")
    values = {"metadata": FIELDS, "max_dead_letters": 1.0, **sides, **changes}
    return AlignOptions(input=(str(folder / pattern),), output=output, **values)


def write_rows(folder: Path) -> None:
    """Write the same documents as JSON lines, as a table and as CSV."""
    records = [
        {"id": name, "text": f"text of {name}", "source": source, "meta": {"score": score},
         "year": year, "good": good}
        for name, (source, score, year, good) in ROWS.items()
    ]  # fmt: skip
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "rows.jsonl").write_text(lines, "utf-8")
    pq.write_table(pa.Table.from_pylist(records), folder / "rows.parquet")
    cells = [["id", "text", "source", "meta.score", "year", "good"]]
    for name, values in ROWS.items():
        cells.append([name, f"text of {name}", *("" if v is None else str(v) for v in values)])
    (folder / "rows.csv").write_text("".join(",".join(row) + "\n" for row in cells), "utf-8")


def read_rows(output: str) -> dict[str, tuple[Any, ...]]:
    dataset = open_dataset(output)
    found = {}
    for shard in range(len(dataset.manifest.shards)):
        index = dataset.read_index(shard, with_names=True)
        columns = [index.metadata[entry.name].to_pylist() for entry in dataset.manifest.metadata]
        found |= dict(zip(index.document_id, zip(*columns, strict=True), strict=True))
    return found


def test_every_format_gives_the_same_columns(tmp_path: Path) -> None:
    write_rows(tmp_path)
    for pattern, asked in (("rows.jsonl", FIELDS), ("rows.parquet", FIELDS), ("rows.csv", TYPED)):
        manifest = align(options(tmp_path, pattern, metadata=asked))
        assert manifest.metadata == COLUMNS
        assert read_rows(str(tmp_path / f"out-{pattern}")) == ROWS
    assert validate_dataset(str(tmp_path / "out-rows.parquet")).findings == ()


def test_documents_are_counted_by_a_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path)
    manifest = align(options(tmp_path, "rows.jsonl"))
    output = str(tmp_path / "out-rows.jsonl")
    groups = count_by(open_dataset(output), "source")
    assert {group.value: group.num_documents for group in groups} == {"web": 2, "数学": 1, None: 1}
    for name in ("num_text_bytes", "num_student_tokens", "num_teacher_tokens"):
        assert sum(getattr(group, name) for group in groups) == manifest.totals[name]
    for name in ("num_mapped", "byte_iou_sum"):
        whole = pytest.approx(manifest.statistics[name], rel=1e-6)
        assert sum(getattr(group, name) for group in groups) == whole
    capsys.readouterr()
    assert explore(["info", output, "--by", "source"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["source", "documents"]
    assert ["web", "2"] in lines
    assert ["(none)", "1"] in lines
    assert explore(["info", output, "--by", "score"]) == 2
    assert 'no metadata "score": it has source (string), meta.score' in capsys.readouterr().err


def test_a_value_that_does_not_fit_makes_a_dead_letter(tmp_path: Path) -> None:
    records = [
        {"id": str(number), "text": "a text", "score": number / 8} for number in range(140)
    ]  # more than a first look reads
    records += [{"id": "bad", "text": "secret", "score": "high"}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "x.jsonl").write_text(lines)
    manifest = align(options(tmp_path, "x.jsonl", metadata="score"))
    assert manifest.totals["num_documents"] == 140
    assert manifest.dead_letters.by_reason == {"bad_metadata": 1}
    letter = json.loads((tmp_path / "out-x.jsonl" / "dead_letters.jsonl").read_text())
    assert (letter["document_id"], letter["reason"]) == ("bad", "bad_metadata")
    assert letter["detail"] == '"score" is of type str here, its column holds float64'


def test_a_field_that_nobody_has(tmp_path: Path) -> None:
    write_rows(tmp_path)
    with pytest.raises(InputError, match=r'none of the first 4 documents has a value of "scor"'):
        align(options(tmp_path, "rows.jsonl", metadata="scor"))
    assert not (tmp_path / "out-rows.jsonl" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["id", "source"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_that_is_there_twice_is_not_chosen_silently(
    tmp_path: Path, name: str, suffix: str
) -> None:
    """As in what a join gives: a CSV's first was taken, and of parquet the last."""
    names = ["id", "text", "source", name]
    if suffix == "csv":
        (tmp_path / "x.csv").write_text(",".join(names) + "\n1,a text,web,2\n")
    else:
        columns = [pa.array([value]) for value in ("1", "a text", "web", "2")]
        pq.write_table(pa.table(columns, names=names), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=f'x.{suffix} has several columns "{name}"; rename all'):
        align(options(tmp_path, f"x.{suffix}", metadata="source"))
    if name == "id":
        assert align(options(tmp_path, f"x.{suffix}", metadata="source", id_field="")).shards


def test_an_input_without_a_usable_document_is_not_the_columns_fault(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": "a", "text": 12, "source": "web"}\n')
    told = r"--metadata source: none of the first 1 documents can be used .* x\.jsonl#0: text_not_a"
    with pytest.raises(InputError, match=told):
        align(options(tmp_path, "x.jsonl", metadata="source"))


def test_a_list_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": "a", "text": "b", "meta": {"tag": ["c"]}}\n')
    told = r'values of "meta\.tag" are lists or objects, which no column can hold: .* or leave meta'
    with pytest.raises(InputError, match=told):
        align(options(tmp_path, "x.jsonl", metadata="meta.tag"))


MISFIT = object()


@pytest.mark.parametrize(
    ("kind", "is_text", "value", "expected"),
    [
        ("string", False, "", ""),
        ("int64", False, 2.0, 2),
        ("int64", False, -(1 << 63), -(1 << 63)),
        ("float64", False, 3, 3.0),
        ("float64", False, float("inf"), float("inf")),
        ("bool", False, False, False),
        *((kind, False, v, None) for kind in ("string", "bool") for v in (None, float("nan"))),
        *(("string", False, value, MISFIT) for value in (1, True, ["a"], b"a")),
        *(("int64", False, value, MISFIT) for value in ("1", True, 1.5, 1 << 63, 1e300)),
        *(("float64", False, value, MISFIT) for value in ("1", False, (1 << 53) + 1)),
        *(("bool", False, value, MISFIT) for value in (0, "true", 1.0)),
        ("int64", True, "-12", -12),
        ("int64", True, "9007199254740993", 9007199254740993),
        ("float64", True, "1e-3", 0.001),
        *(("float64", True, value, None) for value in ("NaN", "nan")),
        ("bool", True, "False", False),
        ("string", True, "7", "7"),
        ("string", True, "", None),
    ],
)
def test_what_fits(kind: MetadataType, is_text: bool, value: Any, expected: Any) -> None:
    """Files of text, such as CSV, are read as what their column holds."""
    field = MetadataField("x", kind)
    if expected is MISFIT:
        with pytest.raises(UnusableError, match=r'"x" is (of type|the number) .* its column holds'):
            fit_value(field, value, is_text=is_text)
    else:
        found = fit_value(field, value, is_text=is_text)
        assert (found, type(found)) == (expected, type(expected))


def test_a_number_that_does_not_fit_is_told() -> None:
    """Its type alone was: "of type int here, its column holds int64"."""
    with pytest.raises(UnusableError, match='"x" is the number 9223372036854775808 here'):
        fit_value(MetadataField("x", "int64"), 1 << 63, is_text=False)


def test_what_an_option_may_say() -> None:
    assert parse_metadata("a, b.c:int64,d:e:bool") == (
        MetadataField("a"),
        MetadataField("b.c", "int64"),
        MetadataField("d:e", "bool"),
    )
    assert parse_metadata("") == ()


@pytest.mark.parametrize("text", ["a,,b", ":int64", "a:float", "a,b,a:bool"])
def test_what_an_option_may_not_say(text: str) -> None:
    with pytest.raises(OptionsError, match=f"--metadata {text}: .*(no field|not a type|twice)"):
        reading_rules(AlignOptions(("in",), "out", "s", "t", metadata=text))


def test_types_follow_from_values() -> None:
    field = MetadataField("x")
    kinds = {"int64": [1, None], "float64": [1, 0.5], "bool": [True], "string": ["a"]}
    for kind, values in kinds.items():
        rows = [(value,) for value in values]  # type: ignore[attr-defined]
        assert settle_columns([field], rows) == (MetadataField("x", kind),)
    for values in ([1, "a"], [True, 1]):
        with pytest.raises(InputError, match=r'"x" are of type .* --metadata x:float64'):
            settle_columns([field], [(v,) for v in values])
    said = MetadataField("x", "bool")
    assert settle_columns([said], [(None,)]) == (said,)
