"""Documents out of files: formats, pieces, bad documents, damaged files."""

import gzip
import io
import json
import os
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_jobs.align import blocks
from beam_jobs.align.blocks import BlockStore, pack_blocks, unpack_block
from beam_jobs.align.buckets import encode_dead_letter
from beam_jobs.align.inputs.decompression import CutStreamError, decompress, zstd
from beam_jobs.align.inputs.files import find_inputs
from beam_jobs.align.inputs.lines import keep_line_count, name_lines
from beam_jobs.align.inputs.listing import InputError
from beam_jobs.align.inputs.pieces import Piece, decode_task, plan_tasks
from beam_jobs.align.inputs.reading import (
    DeadLetter,
    PlacedDocument,
    ReadingRules,
    Reason,
    read_piece,
)
from beam_jobs.left_out import DUPLICATE_OF
from tests.support.corpus import json_line

RULES = ReadingRules(max_document_bytes=1 << 10)
LINES = [json_line(f"doc-{n}", "word ∑ " * n) for n in range(1, 20)]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gzip": gzip.compress,
    "zstd": zstd.compress,
}


def zstd_blocks(lines: list[bytes]) -> bytes:
    """Return a frame with a block for each line, so that a cut frame yields some of them."""
    compressor = zstd.ZstdCompressor()
    blocks = [compressor.compress(line, compressor.FLUSH_BLOCK) for line in lines]
    return b"".join([*blocks, compressor.flush()])


STREAM: dict[str, Callable[[list[bytes]], bytes]] = {
    "gzip": lambda lines: gzip.compress(b"".join(lines)),
    "zstd": zstd_blocks,
}


def read(path: Path, kind: str = "jsonl", compression: str = "none", **place: int | None) -> list:
    piece = Piece(str(path), path.name, kind, compression, **place)  # type: ignore[arg-type]
    return list(read_piece(piece, RULES))


def read_line(
    line: bytes, folder: Path, rules: ReadingRules = RULES
) -> PlacedDocument | DeadLetter:
    path = folder / "lines.jsonl"
    path.write_bytes(line)
    (outcome,) = read_piece(Piece(str(path), path.name, "jsonl", "none"), rules)
    return outcome


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_position_is_the_byte_offset_in_the_uncompressed_file(
    tmp_path: Path, compression: str
) -> None:
    data = b"".join(LINES)
    path = tmp_path / "a"
    path.write_bytes(COMPRESS[compression](data))
    documents = read(path, compression=compression)
    assert [d.document_id for d in documents] == [f"doc-{n}" for n in range(1, 20)]
    for document, line in zip(documents, LINES, strict=True):
        assert data[document.position :].startswith(line)
        assert document.text == json.loads(line)["text"].encode()


@given(
    lines=st.lists(st.sampled_from([*LINES[:3], b"\n", b" \r\n", b"bad\n", b"x" * 5000 + b"\n"])),
    cuts=st.lists(st.integers(0, 20_000)),
    ends_with_newline=st.booleans(),
)
def test_pieces_of_a_file_hold_what_the_file_holds(
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
            piece = Piece(str(path), path.name, "jsonl", "none", start, end)
            outcomes += read_piece(
                piece, RULES, count_lines=partial(keep_line_count, folder, piece)
            )
        letters = [json.loads(encode_dead_letter(as_letter(outcome))) for outcome in outcomes]
        numbers = [letter["line"] for letter in name_lines(letters, folder)]
    whole = read(path)
    assert [replace(outcome, line=None) for outcome in outcomes] == [
        replace(outcome, line=None) for outcome in whole
    ]
    expected = [data[: outcome.position].count(b"\n") + 1 for outcome in whole]
    assert [outcome.line for outcome in whole] == numbers == expected


def as_letter(outcome: PlacedDocument | DeadLetter) -> DeadLetter:
    place = outcome.source, outcome.position
    return DeadLetter(*place, None, Reason.BAD_JSON, "", line=outcome.line)


@pytest.mark.parametrize("first", ["a.jsonl", "b.jsonl"])
def test_a_repeated_id_names_the_line_of_its_first_use(tmp_path: Path, first: str) -> None:
    for start, num_lines in ((0, 7), (90, 5), (1200, 9)):
        piece = Piece("a.jsonl", "a.jsonl", "jsonl", "none", start, start + 1)
        keep_line_count(str(tmp_path), piece, num_lines)
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


@pytest.mark.parametrize("edges", [[0, 6], [0, 1, 6], [0, 2, 3, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_row_groups_hold_what_the_file_holds(tmp_path: Path, edges: list[int]) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n}" for n in range(17)], "other": list(range(17))})
    pq.write_table(table, path, row_group_size=3)
    pieces = [read(path, "parquet", start=a, end=b) for a, b in pairwise(edges)]
    documents = [document for piece in pieces for document in piece]
    assert [d.document_id for d in documents] == [f"a.parquet#{row}" for row in range(17)]
    assert [d.text for d in documents] == [f"text {n}".encode() for n in range(17)]


@pytest.mark.parametrize(
    ("line", "reason", "document_id"),
    [
        (b"{", Reason.BAD_JSON, None),
        (b'{"text": NaN}', Reason.MISSING_TEXT, "lines.jsonl#0"),
        (b'{"id": NaN, "text": "secret" NaN}', Reason.BAD_JSON, None),
        (b'{"x": NaN, "id": "\\ud800", "text": "secret"}', Reason.BAD_JSON, None),
        (b'{"id": Infinity, "text": "secret"}', Reason.BAD_ID, None),
        (b'{"id": 0.5, "text": "secret"}', Reason.BAD_ID, None),
        (b'"secret"', Reason.BAD_JSON, None),
        (b"{}", Reason.MISSING_TEXT, "lines.jsonl#0"),
        (b'{"id": "a", "text": null}', Reason.MISSING_TEXT, "a"),
        (b'{"id": "a", "text": ["secret"]}', Reason.TEXT_NOT_A_STRING, "a"),
        (b'{"id": "a", "text": ""}', Reason.EMPTY_TEXT, "a"),
        (b'{"id": "a", "text": "secret \\udc00"}', Reason.INVALID_UNICODE, None),
        (b'{"id": "a", "text": "secret \xed\xa0\x80"}', Reason.INVALID_UNICODE, None),
        (b'{"id": true, "text": "secret"}', Reason.BAD_ID, None),
        (b'{"id": 123456789012345678901234567890, "text": "secret"}', Reason.BAD_ID, None),
        (b'{"id": "a", "text": "' + b"secret" * 200 + b'"}', Reason.TOO_LARGE, "a"),
        (b'{"id": "a", "text": "' + b"secret" * 2000 + b'"}', Reason.TOO_LARGE, None),
    ],
)
def test_a_bad_line_is_a_dead_letter_without_its_text(
    tmp_path: Path, line: bytes, reason: Reason, document_id: str | None
) -> None:
    outcome = read_line(line, tmp_path)
    assert isinstance(outcome, DeadLetter)
    assert (outcome.reason, outcome.document_id, outcome.position) == (reason, document_id, 0)
    assert "secret" not in outcome.detail


@pytest.mark.parametrize(
    ("line", "document_id"),
    [
        (b'{"text": "x"}', "lines.jsonl#0"),
        (b'{"id": null, "text": "x"}', "lines.jsonl#0"),
        (b'{"id": "", "text": "x"}', "lines.jsonl#0"),
        (b'{"id": 7, "text": "x"}', "7"),
        (b'{"id": 7.0, "text": "x"}', "7"),
        (b'{"id": NaN, "text": "x"}', "lines.jsonl#0"),
        (b'{"id": "a", "text": "x", "score": NaN, "more": [-Infinity]}', "a"),
        (b'{"id": "a", "text": "\\ud83e\\udd17", "score": NaN}', "a"),
        (b'\xef\xbb\xbf{"id": "with a mark", "text": "x"}', "with a mark"),
    ],
)
def test_ids(tmp_path: Path, line: bytes, document_id: str) -> None:
    outcome = read_line(line, tmp_path)
    assert isinstance(outcome, PlacedDocument)
    assert outcome.document_id == document_id


def test_fields_can_be_named_nested_and_switched_off(tmp_path: Path) -> None:
    line = b'{"a": {"b": "nested"}, "a.c": "dotted", "id": "x"}'
    nested = read_line(line, tmp_path, ReadingRules("a.b", "id"))
    dotted = read_line(line, tmp_path, ReadingRules("a.c", ""))
    assert isinstance(nested, PlacedDocument)
    assert isinstance(dotted, PlacedDocument)
    assert (nested.text, nested.document_id) == (b"nested", "x")
    assert (dotted.text, dotted.document_id) == (b"dotted", "lines.jsonl#0")


def test_nested_parquet_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [{"b": "x", "c": 1}], "id": [5]}), path)
    piece = Piece(str(path), "a.parquet", "parquet", "none")
    (document,) = read_piece(piece, ReadingRules("a.b"))
    assert isinstance(document, PlacedDocument)
    assert (document.text, document.document_id) == (b"x", "5")


def test_a_huge_line_costs_little_memory_and_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(LINES[0] + b'{"text": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + LINES[1])
    tracemalloc.start()
    outcomes = read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [getattr(o, "reason", None) for o in outcomes] == [None, Reason.TOO_LARGE, None]
    assert "100000013 bytes" in outcomes[1].detail
    assert peak < 8 << 20


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_cut_file_keeps_what_is_before_the_cut(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"".join(LINES))
    whole = read(path)
    stored = STREAM[compression](LINES)
    kept = set()
    for num_bytes in range(len(stored)):
        path.write_bytes(stored[:num_bytes])
        *documents, last = read(path, compression=compression)
        assert documents == whole[: len(documents)]
        assert (last.reason, last.document_id) == (Reason.UNREADABLE_INPUT, None)
        assert f"cut after {num_bytes} bytes" in last.detail
        kept.add(len(documents))
    assert max(kept) == len(whole)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_frames_in_a_row_are_one_file(compression: str) -> None:
    stored = b"".join(map(COMPRESS[compression], LINES))
    assert decompress(io.BytesIO(stored), compression).read() == b"".join(LINES)
    with pytest.raises(CutStreamError, match="is cut after"):
        decompress(io.BytesIO(stored[:-3]), compression).read()


def test_an_altered_gzip_is_a_dead_letter(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    stored = bytearray(gzip.compress(b"".join(LINES)))
    stored[-6] ^= 1  # in the CRC-32
    path.write_bytes(stored)
    *documents, last = read(path, compression="gzip")
    assert len(documents) <= len(LINES)
    assert last.reason == Reason.UNREADABLE_INPUT


def test_a_damaged_parquet_is_a_dead_letter(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n}" * 50 for n in range(20)]})
    pq.write_table(table, path, row_group_size=10, write_page_checksum=True, use_dictionary=False)
    data = bytearray(path.read_bytes())
    second = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data[second.data_page_offset + second.total_compressed_size - 20] ^= 1
    path.write_bytes(data)
    outcomes = read(path, "parquet")
    assert [o.position for o in outcomes] == list(range(11))
    assert outcomes[-1].reason == Reason.UNREADABLE_INPUT
    path.write_bytes(data[:-8])
    (footer,) = read(path, "parquet")
    assert (footer.position, footer.reason) == (0, Reason.UNREADABLE_INPUT)


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
        with pytest.raises(FileNotFoundError):
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


def test_inputs_that_cannot_be_read_are_errors_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "a.jsonl").write_bytes(LINES[0])
    (tmp_path / "x" / "a.jsonl").write_bytes(LINES[0])
    (tmp_path / "a.bz2").write_bytes(b"")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    pq.write_table(pa.table({"body": ["x"], "url": ["y"]}), tmp_path / "a.parquet")
    cases = {
        (f"{tmp_path}/none-*.jsonl",): "matches no file",
        (f"{tmp_path}/x",): r"is a folder: name its files, such as .*/x/\*\.jsonl",
        (f"{tmp_path}/a.bz2",): "is of no known kind",
        (f"{tmp_path}/a.jsonl", f"{tmp_path}/x/a.jsonl"): 'would be named "a.jsonl"',
        (f"{tmp_path}/a.parquet",): 'has no column "text", it has body, url',
        (f"{tmp_path}/gone*.jsonl",): "gone",
    }
    for patterns, message in cases.items():
        with pytest.raises(InputError, match=message):
            find_inputs(patterns)


def test_tasks_cover_every_byte_once(tmp_path: Path) -> None:
    sizes = {"a.jsonl": 1000, "b.jsonl": 10, "c.jsonl": 20, "d.jsonl": 0, "e.jsonl": 101}
    for name, num_bytes in sizes.items():
        (tmp_path / name).write_bytes(b"x" * num_bytes)
    tasks = plan_tasks(find_inputs([f"{tmp_path}/*"]), task_bytes=100)
    pieces = [piece for task in tasks for piece in decode_task(task)]
    covered: dict[str, list[range]] = {}
    for piece in pieces:
        end = sizes[piece.source] if piece.end is None else piece.end
        covered.setdefault(piece.source, []).append(range(piece.start, end))
    for name, num_bytes in sizes.items():
        assert [byte for part in covered[name] for byte in part] == list(range(num_bytes))
    small = [len(decode_task(task)) for task in tasks]
    assert max(small) >= 3, "small files travel together"
    assert len(covered["a.jsonl"]) == 10


documents = st.builds(
    PlacedDocument,
    source=st.text(min_size=1).filter(str.isprintable),
    position=st.integers(0, 1 << 40),
    document_id=st.text(),
    text=st.binary(max_size=50),
    line=st.none() | st.integers(1, 1 << 40),
)
letters = st.builds(
    DeadLetter,
    source=st.just("a"),
    position=st.integers(0, 1 << 40),
    document_id=st.none() | st.text(min_size=1),
    reason=st.sampled_from(Reason),
    detail=st.text(),
    line=st.none() | st.integers(1, 1 << 40),
)


@given(outcomes=st.lists(documents | letters), num_buckets=st.integers(1, 5))
@pytest.mark.parametrize("shuffle", ["files", "runner"])
def test_blocks_carry_every_document(
    tmp_path_factory: pytest.TempPathFactory,
    shuffle: str,
    outcomes: list[PlacedDocument | DeadLetter],
    num_buckets: int,
) -> None:
    store = BlockStore(shuffle, os.fspath(tmp_path_factory.getbasetemp()))  # type: ignore[arg-type]
    elements = list(store.hand_over(pack_blocks(outcomes, num_buckets)))
    assert all(0 <= bucket < num_buckets for bucket, _ in elements)
    records = [r for b in store.fetch(e for _, e in elements) for r in unpack_block(b)]
    carried = [
        record.dead_letter()
        if record.is_dead
        else PlacedDocument(
            record.source.decode(),
            record.position,
            record.document_id.decode(),
            bytes(record.body),
            line=record.line or None,
        )
        for record in records
    ]
    assert sorted(map(repr, carried)) == sorted(map(repr, outcomes))


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """Let this process have few more files open than it has; yield how many more."""
    more = 64
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/dev/fd")}
    free = (number for number in count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), limits[1]))
    yield more
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_bucket_may_have_blocks_in_more_files_than_can_be_open(
    tmp_path: Path, few_open_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MOST_MAPPED_FILES", few_open_files // 2)
    store = BlockStore("files", str(tmp_path))
    for num_files in (few_open_files // 2, 2 * few_open_files):
        documents = [PlacedDocument("a", n, str(n), b"%d" % n) for n in range(num_files)]
        packed = [store.hand_over(pack_blocks([document], 1)) for document in documents]
        held = list(store.fetch(element for task in packed for _, element in task))
        texts = {bytes(record.body) for block in held for record in unpack_block(block)}
        assert texts == {document.text for document in documents}


@pytest.mark.parametrize("most_mapped_files", [0, 1])
def test_a_cut_block_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_mapped_files: int
) -> None:
    monkeypatch.setattr(blocks, "MOST_MAPPED_FILES", most_mapped_files)
    store = BlockStore("files", str(tmp_path))
    document = PlacedDocument("a", 0, "a", b"text")
    elements = [element for _, element in store.hand_over(pack_blocks([document], 1))]
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileNotFoundError, match="it was cut while the job ran"):
        list(store.fetch(elements))
