import tarfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import pytest

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.dataset.dataset_reading import read_manifest, read_sample
from pipeline.dataset.writing import ShardWriter, WrittenShard
from schemas.document import decode_document
from schemas.errors import DamagedSampleError, DamagedShardError, DatasetError
from schemas.index import encode_index
from schemas.manifest import Manifest, encode_manifest
from tests.support.manifests import MANIFEST
from tests.support.tokenizer_zoo import SENTENCES, load

SOURCES = [
    SourceDocument(f"doc-{n}", (text + text.swapcase()).encode())
    for n, text in enumerate(SENTENCES * 3)
]


def write(*sizes: int, keep_text: bool = False) -> tuple[bytes, WrittenShard]:
    file = BytesIO()
    writer = ShardWriter(file, keep_text=keep_text)
    start = 0
    for size in sizes:
        batch = SOURCES[start : start + size]
        writer.add(align_batch(batch, load("llama_like"), load("qwen_like")))
        start += size
    written = writer.close()
    assert not file.closed
    return file.getvalue(), written


@pytest.mark.parametrize("keep_text", [True, False])
def test_a_shard_is_a_plain_tar(keep_text: bool) -> None:
    data, written = write(10, 11, keep_text=keep_text)
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == [f"{key}.safetensors" for key in written.index.key]
        for source, member in zip(SOURCES, members, strict=True):
            assert (member.mtime, member.uid, member.mode) == (0, 0, 0o644)
            file = tar.extractfile(member)
            assert file is not None
            document = decode_document(file.read())
            assert document.document_id == source.document_id
            assert document.text_sha256 == sha256(source.text).hexdigest()
            assert document.text == (source.text if keep_text else None)
            assert member.offset_data in written.index.payload_offset
    assert data.endswith(bytes(1024))


@pytest.mark.parametrize("sizes", [(21,), (1,) * 21, (20, 1)])
def test_how_documents_are_batched_does_not_show(sizes: tuple[int, ...]) -> None:
    data, written = write(*sizes)
    expected, whole = write(7, 14)
    assert data == expected
    assert encode_index(written.index) == encode_index(whole.index)


def test_an_empty_shard() -> None:
    data, written = write()
    assert data == bytes(1024)
    assert len(written.index) == 0
    assert written.statistics.num_documents == 0
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        assert tar.getmembers() == []


def test_an_error_of_the_file_is_raised() -> None:
    class Full(BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    writer = ShardWriter(Full())
    writer.add(align_batch(SOURCES[:2], load("llama_like"), load("qwen_like")))
    with pytest.raises(OSError, match="No space left"):
        writer.close()


class TestReading:
    def test_every_altered_byte_of_a_payload_is_noticed(self) -> None:
        data, written = write(1)
        start = int(written.index.payload_offset[0])
        for position in range(start, start + int(written.index.payload_bytes[0])):
            altered = bytearray(data)
            altered[position] ^= 0x10
            with pytest.raises(
                DamagedSampleError, match=f"sample {written.index.key[0]} in shard x.tar has CRC-32"
            ):
                read_sample(BytesIO(altered), written.index, 0, shard="x.tar")

    def test_a_cut_shard_is_noticed_wherever_it_is_cut(self) -> None:
        """webdataset and tarfile take a tar that ends between two members for a whole one."""
        data, written = write(3)
        last = int(written.index.payload_offset[-1] + written.index.payload_bytes[-1])
        for size in range(0, last, 37):
            with pytest.raises(DamagedShardError, match=r"shard x\.tar ends inside sample .* cut"):
                read_sample(BytesIO(data[:size]), written.index, 2, shard="x.tar")


class TestReadManifest:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "manifest.json").write_bytes(encode_manifest(MANIFEST))
        return tmp_path

    @pytest.mark.parametrize("name", ["{}", "{}/", "{}/manifest.json", "file://{}"])
    def test_by_folder_file_or_url(self, folder: Path, name: str) -> None:
        found: Manifest = read_manifest(name.format(folder))
        assert found == MANIFEST

    def test_below_a_folder_that_readers_take_for_a_chain(self, folder: Path) -> None:
        """The manifest "does not exist", and the hint named the same path."""
        moved = folder.rename(folder.with_name("a::b"))
        with pytest.raises(DatasetError, match="take :: for a chain of URLs: rename that folder"):
            read_manifest(str(moved))

    def test_none_there(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match=r"does not exist: .* has not finished; name a fin"):
            read_manifest(str(tmp_path))
