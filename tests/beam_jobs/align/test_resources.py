"""A job that runs out of disk, of memory or of time going forward."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_jobs import shortages
from beam_jobs.align.__main__ import main
from beam_jobs.align.command import align
from beam_jobs.align.job import estimate_disk, estimate_memory
from beam_jobs.job_errors import OptionsError
from beam_jobs.shortages import explain_shortage, free_bytes, require_disk
from pipeline.command_line.commands import run_command
from tests.support.corpus import align_options, command_line, digests, reference_dataset
from tests.support.datasets import build_dataset


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk that takes both tokenizers and some of the shards."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root can mount a disk that is small enough to fill")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_named_and_the_job_continues(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, reference = reference_dataset()
    output = small_disk / "out"
    arguments = command_line(align_options(corpus, output))
    capsys.readouterr()
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith(f"vocag align: the disk is full: {output}"), line
    assert re.search(r"the whole job needs about 4\.\d+ MB", line), line
    assert line.endswith("free some space; run the same command again to resume"), line
    mount("-o", "remount,size=64m", str(small_disk))
    assert main(arguments) == 0
    assert digests(output) == digests(reference)


def test_a_disk_that_is_far_too_small_is_refused_before_the_start(small_disk: Path) -> None:
    mount("-o", "remount,size=400k", str(small_disk))
    with pytest.raises(OptionsError, match=r"has \d+ kB of free disk, and the job will need about"):
        align(align_options(reference_dataset()[0], small_disk / "out"))
    assert not list(small_disk.glob("out/*/*"))


def test_estimates() -> None:
    assert estimate_disk(100, keep_text=False, shuffle="runner") == 300
    assert estimate_disk(100, keep_text=True, shuffle="files") == 500
    least, most = (
        estimate_memory(256 << 20, keep_text=False, longest_document=n) for n in (0, 60_000_000)
    )
    assert most - least == 2_400_000_000


def test_room_is_compared_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shortages, "free_bytes", lambda folder: 1000)
    require_disk(str(tmp_path), 1000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "bucket.tar").write_bytes(bytes(500))
    require_disk(str(tmp_path), 1500, earlier=str(tmp_path / "run"))
    require_disk("gs://bucket/data", 10**15)
    assert caplog.text == ""
    require_disk(str(tmp_path / "not" / "there"), 2000)
    assert "has 1.00 kB of free disk" in caplog.text
    with pytest.raises(OptionsError, match=r"has 1.00 kB of free disk.*; free some"):
        require_disk(str(tmp_path), 2001)


def test_a_full_disk_is_named_by_a_command_that_writes_little(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ids, left = small_disk / "data", tmp_path / "ids.txt", small_disk / "left"
    build_dataset(folder)
    ids.write_text("doc-0-3\n")
    left.write_bytes(bytes(free_bytes(str(small_disk))))
    assert run_command(["remove", str(folder), "--ids", str(ids)]) == 1
    said = capsys.readouterr().err
    assert f"the disk is full: {folder}/.align-lock could not be written, 0 B are free" in said
    left.unlink()
    assert run_command(["remove", str(folder), "--ids", str(ids)]) == 0


def test_a_full_temporary_folder_is_named_and_not_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, output = tmp_path / "tmp", tmp_path / "out"
    free = {str(temporary): 12_000, str(output): 5 * 10**9}
    monkeypatch.setattr("beam_jobs.shortages.tempfile.gettempdir", lambda: str(temporary))
    monkeypatch.setattr(shortages, "free_bytes", lambda path: free[str(path).removesuffix("/a")])
    nameless = "OSError: [Errno 28] No space left on device"
    for text in (nameless, f"{nameless}: '{temporary}/a'"):
        said = explain_shortage(text, str(output), 10**9)
        assert said is not None
        assert re.match(f"the disk is full: {temporary}(/a)? could not be .*, 12.0 kB are ", said)
        assert said.endswith("free some space, or let TMPDIR name a folder on another disk")
    free[str(output)] = 7_000
    said = explain_shortage(nameless, str(output), 10**9)
    assert said == (
        f"the disk is full: {output} could not be written, 7.00 kB are free, and the whole job "
        "needs about 1.00 GB; free some space"
    )


@pytest.mark.parametrize(
    ("text", "shortage"),
    [
        ("OSError: [Errno 28] No space left on device: '/a.tar'\n", "the disk is full: /a.tar "),
        ("[Errno 28] No space left on device [while running 'x']", "the disk is full: . could not"),
        ("OSError: [Errno 122] Disk quota exceeded", "the disk is full"),
        ("OSError: [Errno 27] File too large", "would exceed the size that ulimit -f allows"),
        ("memory allocation of 8388608 bytes failed\nstack backtrace:", "memory ran out"),
        ("RuntimeError: can't start new thread", "memory ran out"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to", "memory ran out"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to", "the GPU's memory ran out"),
        ("torch.AcceleratorError: CUDA error: out of memory", "--batch-tokens or fewer --workers"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "the GPU's memory ran out"),
        ("KeyError: 28", None),
    ],
)  # fmt: skip
def test_shortages_are_told_from_other_failures(text: str, shortage: str | None) -> None:
    explained = explain_shortage(text, ".")
    assert shortage in explained if explained and shortage else explained is shortage
