"""Documents out of files: formats, pieces, bad documents, damaged files."""

import json
import os
import shlex
import tracemalloc
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_jobs.align.bucket_blocks import BlockStore, Record, pack_blocks, unpack_block
from beam_jobs.align.buckets import encode_dead_letter
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import (
    DeadLetter,
    MetadataField,
    Outcome,
    PlacedDocument,
    ReadingRules,
    Reason,
)
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.input_identity import InputChangedError
from beam_jobs.align.inputs.lines import keep_line_count, name_lines
from beam_jobs.align.inputs.parts import InputFile, InputPart, decode_task, plan_tasks
from beam_jobs.align.inputs.taken_ids import TakenId
from beam_jobs.job_errors import InputError
from beam_jobs.left_out import DUPLICATE_OF
from pipeline.command_line.failures import hints_of
from tests.support.corpus import json_line

RULES = ReadingRules(max_document_bytes=1 << 10)
LINES = [json_line(f"doc-{n}", "word ∑ " * n) for n in range(1, 20)]


def part_of(path: Path, kind: str = "jsonl", **place: int | None) -> InputPart:
    status = path.stat() if path.exists() else None
    size, modified = (status.st_size, status.st_mtime_ns) if status else (0, 0)
    file = InputFile(str(path), path.name, size, kind, "none", modified)
    return InputPart(file, **place)  # type: ignore[arg-type]


def read(path: Path, kind: str = "jsonl", **place: int | None) -> list:
    return list(read_part(part_of(path, kind, **place), RULES))


def read_line(line: bytes, folder: Path, rules: ReadingRules = RULES) -> Outcome:
    path = folder / "lines.jsonl"
    path.write_bytes(line)
    (outcome,) = read_part(part_of(path), rules)
    return outcome


@given(
    lines=st.lists(st.sampled_from([*LINES[:3], b"\n", b" \r\n", b"bad\n", b"x" * 5000 + b"\n"])),
    cuts=st.lists(st.integers(0, 20_000)),
    ends_with_newline=st.booleans(),
)
def test_parts_of_a_file_hold_what_the_file_holds(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    cuts: list[int],
    ends_with_newline: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    data = b"".join(lines)
    path.write_bytes(data if ends_with_newline else data.removesuffix(b"\n"))
    edges = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    outcomes = []
    with TemporaryDirectory() as folder:
        for start, end in pairwise(edges):
            part = part_of(path, start=start, end=end)
            outcomes += read_part(part, RULES, count_lines=partial(keep_line_count, folder, part))
        letters = [json.loads(encode_dead_letter(as_letter(outcome))) for outcome in outcomes]
        numbers = [letter["line"] for letter in name_lines(letters, folder)]
    whole = read(path)
    unnumbered = partial(msgspec.structs.replace, line=None)
    assert list(map(unnumbered, outcomes)) == list(map(unnumbered, whole))
    expected = [data[: outcome.position].count(b"\n") + 1 for outcome in whole]
    assert [outcome.line for outcome in whole] == numbers == expected


def as_letter(outcome: Outcome) -> DeadLetter:
    place = outcome.source, outcome.position
    return DeadLetter(*place, None, Reason.BAD_JSON, "", line=outcome.line)


@pytest.mark.parametrize("first", ["a.jsonl", "b.jsonl"])
def test_a_repeated_id_names_the_line_of_its_first_use(tmp_path: Path, first: str) -> None:
    for start, num_lines in ((0, 7), (90, 5), (1200, 9)):
        part = part_of(Path("a.jsonl"), start=start, end=start + 1)
        keep_line_count(str(tmp_path), part, num_lines)
    detail = f"{DUPLICATE_OF}{first}#95"
    letter = DeadLetter("a.jsonl", 1300, "x", Reason.DUPLICATE_ID, detail, 4, 2)
    (named,) = name_lines([json.loads(encode_dead_letter(letter))], str(tmp_path))
    assert named["line"] == 16
    line = {"a.jsonl": 9, "b.jsonl": 2}[first]  # b was not cut
    assert named["detail"] == f"the id was first used at {first} line {line}"


def test_a_text_file_begins_behind_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfthe text")
    (document,) = read(path, "text")
    assert document.text == b"the text"
    path.write_bytes(b"\xef\xbb\xbf" + b"x" * RULES.max_document_bytes)
    assert isinstance(read(path, "text")[0], PlacedDocument)
    path.write_bytes(b"\xef\xbb\xbf" + b"x" * (RULES.max_document_bytes + 1))
    assert read(path, "text")[0].reason == Reason.TOO_LARGE
    path.write_bytes(b"\xef\xbb\xbf")
    assert read(path, "text")[0].reason == Reason.EMPTY_TEXT


@pytest.mark.parametrize("edges", [[0, 6], [0, 2, 3, 6]])
def test_row_groups_hold_what_the_file_holds(tmp_path: Path, edges: list[int]) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n}" for n in range(17)], "other": list(range(17))})
    pq.write_table(table, path, row_group_size=3)
    parts = [read(path, "parquet", start=a, end=b) for a, b in pairwise(edges)]
    documents = [document for part in parts for document in part]
    assert [d.document_id for d in documents] == [f"a.parquet#{row}" for row in range(17)]
    assert [d.text for d in documents] == [f"text {n}".encode() for n in range(17)]


@pytest.mark.parametrize(
    ("line", "reason", "document_id"),
    [
        (b'{"text": "x"}', None, "lines.jsonl#0"),
        (b'{"id": null, "text": "x"}', None, "lines.jsonl#0"),
        (b'{"id": "", "text": "x"}', None, "lines.jsonl#0"),
        (b'{"id": 7.0, "text": "x"}', None, "7"),
        (b'{"id": NaN, "text": "x"}', None, "lines.jsonl#0"),
        (b'{"id": "a", "text": "x", "score": NaN, "more": [-Infinity]}', None, "a"),
        (b'{"id": "a", "text": "\\ud83e\\udd17", "score": NaN}', None, "a"),
        (b'\xef\xbb\xbf{"id": "with a mark", "text": "x"}', None, "with a mark"),
        (b"{", Reason.BAD_JSON, None),
        (b'{"text": NaN}', Reason.MISSING_TEXT, "lines.jsonl#0"),
        (b'{"id": NaN, "text": "secret" NaN}', Reason.BAD_JSON, None),
        (b'{"x": NaN, "id": "\\ud800", "text": "secret"}', Reason.INVALID_UNICODE, None),
        (b'{"id": Infinity, "text": "secret"}', Reason.BAD_ID, None),
        (b'{"id": 0.5, "text": "secret"}', Reason.BAD_ID, None),
        (b'"secret"', Reason.BAD_JSON, None),
        (b"{}", Reason.MISSING_TEXT, "lines.jsonl#0"),
        (b'{"id": "a", "text": null}', Reason.MISSING_TEXT, "a"),
        (b'{"id": "a", "text": ["secret"]}', Reason.TEXT_NOT_A_STRING, "a"),
        (b'{"id": "a", "text": ""}', Reason.EMPTY_TEXT, "a"),
        (b'{"id": "a", "text": "secret \\udc00"}', Reason.INVALID_UNICODE, "a"),
        (b'{"id": "a", "text": "secret \xed\xa0\x80"}', Reason.INVALID_UNICODE, "a"),
        (b'{"id": true, "text": "secret"}', Reason.BAD_ID, None),
        (b'{"id": 123456789012345678901234567890, "text": "secret"}', Reason.BAD_ID, None),
        (b'{"id": "a", "text": "' + b"secret" * 200 + b'"}', Reason.TOO_LARGE, "a"),
        (b'{"id": "a", "text": "' + b"secret" * 2000 + b'"}', Reason.TOO_LARGE, None),
    ],
)
def test_a_line_is_a_document_or_a_dead_letter_without_its_text(
    tmp_path: Path, line: bytes, reason: Reason | None, document_id: str | None
) -> None:
    outcome = read_line(line, tmp_path)
    assert (outcome.document_id, outcome.position) == (document_id, 0)
    assert getattr(outcome, "reason", None) == reason
    assert "secret" not in getattr(outcome, "detail", "")


def test_an_id_beyond_64_bits_is_told_as_a_number(tmp_path: Path) -> None:
    outcome = read_line(b'{"id": 18446744073709551616, "text": "x"}', tmp_path)
    detail = '"id" is the number 1.8446744073709552e+19, not a string or an integer of 64 bits'
    assert isinstance(outcome, DeadLetter)
    assert outcome.detail == detail


def test_fields_can_be_named_nested_and_switched_off(tmp_path: Path) -> None:
    line = b'{"a": {"b": "nested"}, "a.c": "dotted", "id": "x"}'
    nested = read_line(line, tmp_path, ReadingRules("a.b", "id"))
    dotted = read_line(line, tmp_path, ReadingRules("a.c", ""))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [{"b": "x", "c": 1}], "id": [5]}), path)
    (row,) = read_part(part_of(path, "parquet"), ReadingRules("a.b"))
    found = [(o.text, o.document_id) for o in (nested, dotted, row)]
    assert found == [(b"nested", "x"), (b"dotted", "lines.jsonl#0"), (b"x", "5")]


def test_a_huge_line_costs_little_memory_and_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(LINES[0] + b'{"text": "')
        for _ in range(30):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + LINES[1])
    tracemalloc.start()
    outcomes = read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [getattr(o, "reason", None) for o in outcomes] == [None, Reason.TOO_LARGE, None]
    assert "30000013 bytes" in outcomes[1].detail
    assert peak < 8 << 20


@pytest.mark.parametrize("edges", [[0, 4], [0, 1, 2, 3, 4]])
def test_damage_to_a_parquet_page_costs_its_row_group(tmp_path: Path, edges: list[int]) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n}" * 50 for n in range(40)]})
    pq.write_table(table, path, row_group_size=10, write_page_checksum=True, use_dictionary=False)
    data = bytearray(path.read_bytes())
    second = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data[second.data_page_offset + second.total_compressed_size - 20] ^= 1
    path.write_bytes(data)
    parts = [read(path, "parquet", start=a, end=b) for a, b in pairwise(edges)]
    outcomes = [outcome for part in parts for outcome in part]
    assert [o.position for o in outcomes] == [*range(11), *range(20, 40)]
    assert outcomes[10].reason == Reason.UNREADABLE_INPUT
    assert "rows 10 to 19, 10 of row group 1, can't be read" in outcomes[10].detail
    for whole in (data[:-8], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(whole)
        (letter,) = read(path, "parquet")
        assert (letter.position, letter.reason) == (0, Reason.UNREADABLE_INPUT)
        assert "can't be read" in letter.detail


def test_invalid_unicode_in_parquet_costs_one_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pa.array([b"good", b"bad \xff", b"good"], pa.binary())
    for column in (raw, pa.Array.from_buffers(pa.string(), 3, raw.buffers())):
        pq.write_table(pa.table({"text": column}), path)
        outcomes = read(path, "parquet")
        reasons = [getattr(outcome, "reason", None) for outcome in outcomes]
        assert reasons == [None, Reason.INVALID_UNICODE, None]


def test_failures_of_the_storage_are_raised_not_buried(tmp_path: Path) -> None:
    for kind in ("jsonl", "text", "parquet"):
        with pytest.raises(InputChangedError, match="gone was removed"):
            read(tmp_path / "gone", kind)


def test_sources_do_not_depend_on_where_the_corpus_lies(tmp_path: Path) -> None:
    for root in ("here", "there/deep"):
        folder = tmp_path / root / "corpus" / "x"
        folder.mkdir(parents=True)
        (folder / "b.jsonl").write_bytes(LINES[0])
        (folder.parent / "a.txt").write_bytes(b"a")
        found = find_inputs([f"{tmp_path / root}/corpus/**"])
        assert [file.source for file in found] == ["a.txt", "x/b.jsonl"]
    (one,) = find_inputs([str(folder / "b.jsonl")])
    assert one.source == "b.jsonl"


def test_a_name_holds_what_a_line_of_a_table_can(tmp_path: Path) -> None:
    for name in ("a\u202fb.txt", "👩\u200d🚀.txt"):
        (tmp_path / name).write_text("one")
        (found,) = find_inputs([str(tmp_path / name)])
        assert found.source == name
    for name in ("a\nb.txt", "a\u2028b.txt", os.fsdecode(b"\xff.txt")):
        (tmp_path / name).write_text("one")
        with pytest.raises(InputError, match="rename it"):
            find_inputs([str(tmp_path / name)])


def test_inputs_that_cannot_be_read_are_errors_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "a.jsonl").write_bytes(LINES[0])
    (tmp_path / "x" / "a.jsonl").write_bytes(LINES[0])
    (tmp_path / "a.bz2").write_bytes(b"")
    cases = {
        (f"{tmp_path}/x",): r"is a folder: name its files, such as --input '.*/x/\*\*/\*\.jsonl'",
        (f"{tmp_path}/a.bz2",): "is of no known kind",
        (f"{tmp_path}/a.jsonl", f"{tmp_path}/x/a.jsonl"): 'would be named "a.jsonl"',
    }
    for patterns, message in cases.items():
        with pytest.raises(InputError, match=message):
            find_inputs(patterns)


def test_two_stars_are_any_folders_and_no_hidden_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.md", "x/b.md", "x/y/c.txt", "x/y/d.md", ".git/e.md", "x/.f.md", "g.png"):
        path = tmp_path / "notes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" if name == "g.png" else name.encode())

    def sources(pattern: str) -> list[str]:
        found = find_inputs([f"{tmp_path}/notes/{pattern}"], format="text")
        return [file.source for file in found]

    assert sources("*/*") == [".git/e.md", "x/.f.md", "x/b.md"]
    assert sources("**/.*") == ["x/.f.md"]
    assert caplog.text == ""
    assert sources("**.md") == sources("**/*.md") == ["a.md", "x/b.md", "x/y/d.md"]
    assert sources("**/y/**/*") == ["x/y/c.txt", "x/y/d.md"]
    assert f"leaves out 2 hidden files, such as {tmp_path}/notes/.git/e.md: **" in caplog.text
    with pytest.raises(InputError, match="is a folder: name its files") as caught:
        find_inputs([f"{tmp_path}/notes"])
    (hint,) = hints_of(caught.value)
    kind, name, *patterns = shlex.split(hint.removeprefix("hint: --format "))
    assert (kind, name, patterns[1]) == ("text", "--input", "--input")
    found = find_inputs(patterns[::2], format="text")
    assert [file.source for file in found] == ["a.md", "x/b.md", "x/y/c.txt", "x/y/d.md"]


def test_tasks_cover_every_byte_once(tmp_path: Path) -> None:
    sizes = {"a.jsonl": 1000, "b.jsonl": 10, "c.jsonl": 20, "d.jsonl": 0, "e.jsonl": 101}
    for name, num_bytes in sizes.items():
        (tmp_path / name).write_bytes(b"x" * num_bytes)
    tasks = plan_tasks(find_inputs([f"{tmp_path}/*"]), task_bytes=100)
    covered: dict[str, list[range]] = {}
    for part in (part for task in tasks for part in decode_task(task)):
        end = part.file.num_bytes if part.end is None else part.end
        covered.setdefault(part.file.source, []).append(range(part.start, end))
    for name, num_bytes in sizes.items():
        assert [byte for part in covered[name] for byte in part] == list(range(num_bytes))
    small = [len(decode_task(task)) for task in tasks]
    assert max(small) >= 3, "small files travel together"
    assert len(covered["a.jsonl"]) == 10


places = {"source": st.just("a"), "position": st.integers(0, 1 << 40)}
line = {"line": st.none() | st.integers(1, 1 << 40)}
values = st.text() | st.integers(-(1 << 63), (1 << 63) - 1) | st.none()
documents = st.builds(PlacedDocument, metadata=st.tuples(values, st.floats()), **places, **line)
letters = st.builds(
    DeadLetter, reason=st.sampled_from(Reason), first_line=st.none(), **places, **line
)
taken = st.builds(TakenId, **places)


@given(records=st.lists(documents | letters) | st.lists(taken), num_buckets=st.integers(1, 5))
@pytest.mark.parametrize("shuffle", ["files", "runner"])
def test_blocks_carry_every_record(
    tmp_path_factory: pytest.TempPathFactory, shuffle: str, records: list[Record], num_buckets: int
) -> None:
    store = BlockStore(shuffle, os.fspath(tmp_path_factory.getbasetemp()))  # type: ignore[arg-type]
    elements = list(store.hand_over(pack_blocks(records, num_buckets)))
    assert all(0 <= bucket < num_buckets for bucket, _ in elements)
    carried = [r for b in store.fetch(e for _, e in elements) for r in unpack_block(b)]
    assert sorted(map(repr, carried)) == sorted(map(repr, records))


def test_a_cut_block_file_is_an_error(tmp_path: Path) -> None:
    store = BlockStore("files", str(tmp_path))
    document = PlacedDocument("a", 0, "a", b"text")
    elements = [element for _, element in store.hand_over(pack_blocks([document], 1))]
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileNotFoundError, match="it was cut while the job ran"):
        list(store.fetch(elements))


ODD_VALUES = [
    b'"cut \\ud83d"',
    b'"\\udc00"',
    b'"Mu\xf1oz"',
    b'"\xed\xa0\x80"',
    b"9" * 4400,
    b"[" * 3000 + b"]" * 3000,
    b"[" * 100_000 + b'"]}"' + b"]" * 100_000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b'{"\xf1\\ud83d": "\xf1"}',
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("value", ODD_VALUES)
def test_an_odd_value_costs_documents_that_need_it(tmp_path: Path, name: str, value: bytes) -> None:
    rules = ReadingRules(id_field="m.id", metadata=(MetadataField("m.n", "int64"),))
    whole = b'{"m": {"id": "i", "n": 7, "o": %s}, "text": "fine", "title": %s}'
    records = [
        b'{"m": {"id": "b"}, "text": "before"}',
        whole % (value, value),
        b'{"m": {"id": "c", "n": 1}, "text": %s}' % value,
        b'{"m": {"id": %s}, "text": "x"}' % value,
        b'{"m": {"id": "d", "n": %s}, "text": "x"}' % value,
        b'{"m": {"id": "e", "n": 8}, "text": "behind"}',
    ]
    data = b"\n".join(records) if name == "a.jsonl" else b"[" + b",\n".join(records) + b"]"
    (tmp_path / name).write_bytes(data)
    (file,) = find_inputs([str(tmp_path / name)])
    before, odd, *letters, behind = read_part(InputPart(file), rules)
    assert isinstance(odd, PlacedDocument)
    assert (odd.document_id, odd.text, odd.metadata) == ("i", b"fine", (7,))
    assert (before.document_id, behind.document_id) == ("b", "e")
    assert len(letters) == 3
    assert all(isinstance(letter, DeadLetter) for letter in letters)


@pytest.mark.parametrize("torn", [b"[" * 3000 + b"]" * 2999, b'{"a":' * 3000 + b"}" * 3000 + b"]"])
def test_what_is_torn_stays_torn_however_deep(tmp_path: Path, torn: bytes) -> None:
    outcome = read_line(
        b'{"id": "a", "text": "fine", "m": ' + torn + b"}", tmp_path, ReadingRules()
    )
    assert outcome.reason == Reason.BAD_JSON


@pytest.mark.parametrize("page", ["docs/start/troubleshooting.md", "schemas/README.md"])
def test_every_reason_is_explained(page: str) -> None:
    text = (Path(__file__).parents[3] / page).read_text("utf-8")
    assert not [reason for reason in Reason if f"`{reason}`" not in text]
