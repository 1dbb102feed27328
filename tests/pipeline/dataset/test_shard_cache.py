"""The shard cache: right bytes or an error, within its limit, for several processes at once."""

import errno
import fcntl
import http.server
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial
from hashlib import sha256

import fsspec
import pytest
import torch
from filelock import FileLock

from pipeline.dataset.cache import ListedFile, ShardCache
from pipeline.remote import first_contact
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from schemas.errors import DamagedShardError
from tests.support.datasets import flip
from tests.support.streaming_data import make_documents, write_dataset

SIZE = 1000


@pytest.fixture
def remote():
    """Return a function that stores bytes in memory and describes them."""
    filesystem = fsspec.filesystem("memory")

    def store(name, data):
        filesystem.pipe_file(f"/cache-test/{name}", data)
        return ListedFile(f"memory://cache-test/{name}", len(data), sha256(data).hexdigest())

    yield store
    filesystem.rm("/cache-test", recursive=True)


def content(number):
    """Return SIZE bytes that differ by number."""
    return number.to_bytes(4, "big") * (SIZE // 4)


def cached(folder):
    return {path.name for path in folder.iterdir() if not path.suffix}


def test_a_file_is_fetched_once_and_then_read_locally(remote, tmp_path):
    file = remote("a", content(1))
    cache = ShardCache(tmp_path, 10 * SIZE)
    with cache.open(file) as opened:
        assert opened.read() == content(1)
    fsspec.filesystem("memory").pipe_file("/cache-test/a", b"changed")
    with cache.open(file) as opened:
        assert opened.read() == content(1)
    assert cached(tmp_path) == {file.sha256}
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("data", [content(2), content(1)[:-1], content(1) + b"x", b""])
def test_other_bytes_than_the_manifest_s_are_refused(remote, tmp_path, data):
    file = remote("a", content(1))
    fsspec.filesystem("memory").pipe_file("/cache-test/a", data)
    with pytest.raises(DamagedShardError, match=rf"a has {len(data)} bytes and SHA-256 .*restore"):
        ShardCache(tmp_path, 10 * SIZE).open(file)
    assert cached(tmp_path) == set()
    assert not list(tmp_path.glob("*.part"))


def test_a_transfer_that_fails_once_is_repeated(remote, tmp_path, monkeypatch):
    file = remote("a", content(1))
    answers = iter([[content(1)[:500], b"garbage" * 100], [content(1)]])
    monkeypatch.setattr("pipeline.dataset.cache._chunks", lambda file: next(answers))
    with ShardCache(tmp_path, 10 * SIZE).open(file) as opened:
        assert opened.read() == content(1)


def test_a_missing_file_is_named(remote, tmp_path):
    remote("a", b"")
    with pytest.raises(DamagedShardError, match=r"memory://cache-test/none is missing: restore"):
        ShardCache(tmp_path, SIZE).open(ListedFile("memory://cache-test/none", 3, "0" * 64))


def test_the_least_recently_opened_files_make_room(remote, tmp_path):
    files = [remote(str(number), content(number)) for number in range(5)]
    cache = ShardCache(tmp_path, 3 * SIZE)
    for moment, number in enumerate([0, 1, 2, 0, 3, 4]):
        cache.open(files[number]).close()
        os.utime(tmp_path / files[number].sha256, (moment, moment))
        total = sum(path.stat().st_size for path in tmp_path.iterdir() if not path.suffix)
        assert total <= 3 * SIZE
    assert cached(tmp_path) == {files[number].sha256 for number in (0, 3, 4)}


def test_a_file_that_is_read_survives_its_removal(remote, tmp_path):
    files = [remote(str(number), content(number)) for number in range(3)]
    cache = ShardCache(tmp_path, SIZE)
    with cache.open(files[0]) as opened:
        cache.open(files[1]).close()
        assert cached(tmp_path) == {files[1].sha256}
        assert opened.read() == content(0)


def test_a_file_larger_than_the_cache_is_refused_with_the_remedy(remote, tmp_path):
    with pytest.raises(ValueError, match=r"has 1000 bytes, the shard cache .* is limited to 999"):
        ShardCache(tmp_path, SIZE - 1).open(remote("a", content(1)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_leaves_nothing(remote, tmp_path, monkeypatch, number):
    def full(file):
        yield content(1)[:10]
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pipeline.dataset.cache._chunks", full)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        ShardCache(tmp_path, 10 * SIZE).open(remote("a", content(1)))
    assert caught.value.filename.endswith(".part")
    (note,) = caught.value.__notes__
    assert f"{tmp_path} needs {SIZE} bytes more, and is below its limit of {10 * SIZE}" in note
    assert "(of vocag train, set HOME)" in note
    assert not list(tmp_path.glob("*.part"))


def test_a_download_that_was_killed_is_removed_and_done_again(remote, tmp_path):
    files = [remote(str(number), content(number)) for number in range(2)]
    cache = ShardCache(tmp_path, 2 * SIZE)
    for file in files:
        (tmp_path / f"{file.sha256}.part").write_bytes(bytes(SIZE))
    with cache.open(files[0]) as opened:
        assert opened.read() == content(0)
    assert not list(tmp_path.glob("*.part"))


def test_a_download_under_way_keeps_its_space(remote, tmp_path):
    files = [remote(str(number), content(number)) for number in range(2)]
    cache = ShardCache(tmp_path, SIZE + SIZE // 2)
    part = tmp_path / f"{files[1].sha256}.part"
    with FileLock(tmp_path / f"{files[1].sha256}.lock"):
        part.write_bytes(bytes(SIZE))
        assert not cache._reserve(tmp_path / f"{files[0].sha256}.part", SIZE)
        assert part.exists()
    assert cache._reserve(tmp_path / f"{files[0].sha256}.part", SIZE)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_folder_without_locks_is_named(remote, tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ValueError, match=f"cache {tmp_path} is on a file system without locks"):
        ShardCache(tmp_path, 10 * SIZE).open(remote("a", content(1)))


def test_prefetching_fills_the_cache_and_logs_failures(remote, tmp_path, caplog):
    files = [remote(str(number), content(number)) for number in range(3)]
    cache = ShardCache(tmp_path, 10 * SIZE)
    missing = ListedFile("memory://cache-test/none", 3, "0" * 64)
    with caplog.at_level(logging.WARNING, "pipeline.dataset.cache"):
        for future in cache.prefetch([*files, missing]):
            future.result(timeout=30)
    assert cached(tmp_path) == {file.sha256 for file in files}
    assert "memory://cache-test/none is missing" in caplog.text
    assert cache.prefetch(files) == []


class CountingHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and notes each GET."""

    requests: list

    def do_GET(self):
        self.requests.append(self.path)
        super().do_GET()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve a dataset over HTTP; return its URL, the dataset and the list of requests."""
    monkeypatch.setattr(first_contact, "FIRST_ANSWER_SECONDS", 60)  # a busy machine answers late
    documents = make_documents([40 + 3 * number for number in range(24)])
    dataset = write_dataset(tmp_path / "data", documents, shard_sizes=[4] * 6)
    CountingHandler.requests = []
    handler = partial(CountingHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/data", dataset, CountingHandler.requests
        listening.shutdown()


def stream(path, cache_folder, **options):
    defaults = {"seq_length": 128, "teacher_seq_length": 128, "window_rows": 2, "seed": 3}
    defaults |= {"shuffle_shards": 1, "cache_folder": cache_folder, "cache_bytes": 1 << 20}
    return AlignedRows(StreamConfig(Reading(path), **(defaults | options)))


def tar_requests(requests):
    return [path for path in requests if path.endswith(".tar")]


def test_a_remote_dataset_gives_the_rows_of_the_local_one(server, tmp_path):
    url, dataset, requests = server
    local = stream(str(dataset.folder), tmp_path / "unused")
    remote = stream(url, tmp_path / "cache")
    assert len(remote) == len(local) > 8
    samples = range(len(local))
    assert torch.equal(remote.__getitems__(samples).buffer, local.__getitems__(samples).buffer)
    assert sorted(tar_requests(requests)) == sorted(set(tar_requests(requests))), "fetched once"
    again = stream(url, tmp_path / "cache")
    assert torch.equal(again[0].buffer, local[0].buffer)
    assert len(tar_requests(requests)) == 6
    assert not (tmp_path / "unused").exists(), "a local dataset is read in place"


def test_groups_are_fetched_ahead_of_their_use(server, tmp_path):
    url, _, _ = server
    rows = stream(url, tmp_path / "cache")
    rows[0]
    order = rows.datasets[0].order
    place, group, _ = order.locate(0, 0)
    following = order.group_at(0, place + 1)
    wanted = {*order.group_shards[group], *order.group_shards[following]}
    names = {rows.manifest.shards[shard].sha256 for shard in wanted}
    end = time.monotonic() + 60
    while not names <= cached(tmp_path / "cache" / "shards"):
        assert time.monotonic() < end
        time.sleep(0.02)


_LEAVES_A_QUEUE = """
import sys, time
from pipeline.dataset import cache
def slow(file):
    time.sleep(30)
    yield b""
cache._chunks = slow
files = [cache.ListedFile(f"memory://{name}", 1, name) for name in "abcdefgh"]
cache.ShardCache(sys.argv[1], 100).prefetch(files)
print("ends", flush=True)
"""


def test_a_process_doesnt_wait_for_what_it_fetches_ahead(tmp_path):
    """It stayed until all that was queued had come: half a minute each."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", _LEAVES_A_QUEUE, str(tmp_path)], check=True, timeout=120)
    assert time.monotonic() - start < 30


def test_a_cache_smaller_than_two_groups_is_refused(server, tmp_path):
    url, _, _ = server
    with pytest.raises(ValueError, match=r"cache_bytes 20000 is below \d+, two groups of"):
        stream(url, tmp_path / "cache", cache_bytes=20_000)


def test_a_damaged_remote_shard_raises_or_is_quarantined(server, tmp_path):
    url, dataset, _ = server
    path = dataset.folder / dataset.manifest.shards[2].file
    flip(path, 700)
    rows = stream(url, tmp_path / "one")
    with pytest.raises(DamagedShardError, match=r"http://.*000002-of-000006\.tar has"):
        rows.__getitems__(range(len(rows)))
    rows = stream(url, tmp_path / "two", on_damage="quarantine")
    batch = rows.__getitems__(range(len(rows)))
    num_lost = sum(len(document.student) for document in dataset.documents[8:12])
    assert int(batch["num_quarantined_tokens"].sum()) == num_lost
    assert len(rows.datasets[0].damage.samples) == 4


def _read_all(path, folder):
    rows = stream(path, folder, cache_bytes=70_000)
    return int(rows.__getitems__(range(len(rows))).buffer.sum())


def test_processes_that_fill_one_small_cache_read_the_same(server, tmp_path):
    url, dataset, requests = server
    total = _read_all(str(dataset.folder), tmp_path / "unused")
    with multiprocessing.get_context("fork").Pool(3) as pool:
        found = pool.starmap(_read_all, [(url, tmp_path / "cache")] * 3, chunksize=1)
    assert found == [total] * 3
    sizes = [path.stat().st_size for path in (tmp_path / "cache" / "shards").iterdir()]
    assert sum(sizes) <= 70_000
    assert len(tar_requests(requests)) >= 6
