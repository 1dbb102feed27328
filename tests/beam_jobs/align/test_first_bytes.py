"""Files whose names say something else than their first bytes: the bytes are right."""

import bz2
import gzip
import io
import json
import logging
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_jobs.align.inputs.decompression import zstd
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import PlacedDocument, ReadingRules, Reason
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.parts import InputPart, cut_files
from beam_jobs.job_errors import InputError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstd.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
LINES = b"".join(json.dumps({"id": f"d{n}", "text": f"text {n}"}).encode() + b"\n" for n in (0, 1))


def read(path: Path) -> list[Any]:
    (file,) = find_inputs([str(path)])
    return list(read_part(InputPart(file), ReadingRules()))


def texts_of(path: Path) -> list[bytes]:
    return [o.text for o in read(path) if isinstance(o, PlacedDocument)]


def packed(kind: str) -> bytes:
    data = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(data, "w") as file:
            file.writestr("a.jsonl", LINES)
    else:
        with tarfile.open(fileobj=data, mode="w") as tar:
            entry = tarfile.TarInfo("a.jsonl")
            entry.size = len(LINES)
            tar.addfile(entry, io.BytesIO(LINES))
    return data.getvalue()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_data_is_read_whatever_its_name(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(COMPRESS[kind](LINES))
    with caplog.at_level(logging.WARNING):
        assert texts_of(tmp_path / name) == [b"text 0", b"text 1"]
    is_named = (name.endswith(".gz") and kind == "gzip") or (
        name.endswith(".zst") and kind == "zstd"
    )
    told = "" if is_named else f"{tmp_path / name} is {kind}"
    assert (told in caplog.text) if told else not caplog.text


def test_compressed_csv_and_text_are_read_whatever_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(gzip.compress(b"id,text\na,one\n"))
    (tmp_path / "a.txt").write_bytes(zstd.compress(b"one"))
    assert texts_of(tmp_path / "a.csv") == texts_of(tmp_path / "a.txt") == [b"one"]


def test_plain_data_and_other_endings_are_read(tmp_path: Path) -> None:
    files = dict.fromkeys((".gz", ".zst", ".bz2", ".xz"), LINES)
    files |= {".zstd": zstd.compress(LINES), ".gzip": gzip.compress(LINES)}
    for suffix, data in files.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(data)
        assert texts_of(path) == [b"text 0", b"text 1"]


def test_a_table_is_read_whatever_its_name(tmp_path: Path) -> None:
    table = pa.table({"id": ["a"], "text": ["one"]})
    pq.write_table(table, tmp_path / "a.jsonl")
    with pa.ipc.new_file(tmp_path / "b.jsonl", table.schema) as writer:
        writer.write_table(table)
    assert texts_of(tmp_path / "a.jsonl") == texts_of(tmp_path / "b.jsonl") == [b"one"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    data = packed(kind)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(InputError, match=rf"{name} is a {kind} archive, .* unpack it"):
        read(tmp_path / name)


def test_data_compressed_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(gzip.compress(LINES)))
    with pytest.raises(InputError, match="is gzip within gzip: decompress it once"):
        read(tmp_path / "a.jsonl.gz")


def test_a_compressed_parquet_file_is_refused_under_any_name(tmp_path: Path) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["one"]}), file)
    for name in ("a.parquet.gz", "a.parquet", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(file.getvalue()))
        with pytest.raises(InputError, match="parquet and compressed as a whole"):
            read(tmp_path / name)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2", ".xz"])
def test_an_empty_file_holds_nothing_whatever_its_compression(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b"")
    assert read(tmp_path / f"a.jsonl{suffix}") == []


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv", "a.tsv"])
def test_other_unicode_is_called_by_its_name(tmp_path: Path, name: str, encoding: str) -> None:
    """Once, whatever parts the file is read in."""
    (tmp_path / name).write_bytes(("\ufeff" + 'id,text\n"a","b"\n' * 9).encode(encoding))
    parts = cut_files(find_inputs([str(tmp_path / name)]), task_bytes=64)
    (letter,) = (o for part, _ in parts for o in read_part(part, ReadingRules()))
    is_text = name.endswith(".txt")
    assert letter.reason == (Reason.INVALID_UNICODE if is_text else Reason.UNREADABLE_INPUT)
    kind = encoding[:6].upper()
    assert f"it is {kind}, not UTF-8: convert it, such as iconv -f {kind} -t" in letter.detail
