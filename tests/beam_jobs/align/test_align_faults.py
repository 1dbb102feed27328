"""The align job when things break: workers that raise, killed processes, races, damaged files."""

import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs import storage
from beam_jobs.align import buckets, dataset_making, steps
from beam_jobs.align.__main__ import main
from beam_jobs.align.command import align, describe
from beam_jobs.align.configuration import Attempt, configure
from beam_jobs.align.opened_input import open_input
from beam_jobs.align.options import AlignOptions
from beam_jobs.job_errors import OptionsError
from beam_jobs.locks import OUTPUT_LOCK, hold_lock
from beam_jobs.resuming import find_finished, read_left_file, start_run
from pipeline.command_line.failures import hints_of
from pipeline.drawing.formatting import format_plural
from tests.support.corpus import (
    align_options,
    command_line,
    digests,
    fail,
    json_line,
    make_text,
    reference_dataset,
    small_corpus,
    write_corpus,
)
from tests.support.killing import run_killed


def run_folder(output: Path) -> Path:
    (folder,) = output.glob(".vocag-*")
    return folder


def fail_at(monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[int]:
    """Let the library raise at the given calls, counted over the whole job."""
    counter = itertools.count(1)
    failed: list[int] = []
    original = buckets.align_documents  # type: ignore[attr-defined]

    def align_or_fail(*arguments: object, **keywords: object) -> object:
        call = next(counter)
        if call in calls:
            failed.append(call)
            raise RuntimeError(f"injected at call {call}")
        return original(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(buckets, "align_documents", align_or_fail)
    return failed


def test_a_worker_that_raises_mid_shard_then_a_second_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, reference = reference_dataset()
    arguments = command_line(align_options(corpus, tmp_path))
    failed = fail_at(monkeypatch, 30)
    assert main(arguments) == 1
    assert failed == [30]
    message = capsys.readouterr().err
    assert "injected at call 30" in message
    assert "run the same command again to resume" in message
    assert "injected" in (run_folder(tmp_path) / "error.txt").read_text()
    assert not (tmp_path / "manifest.json").exists()
    committed = list(run_folder(tmp_path).glob("commit-*.json"))
    assert len(committed) > 2
    assert main(arguments) == 0
    assert f"{format_plural(len(committed), 'part')} taken over" in capsys.readouterr().out
    assert digests(tmp_path) == digests(reference)


def test_a_runner_that_tries_bundles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, reference = reference_dataset()
    failed = fail_at(monkeypatch, 3, 20, 40)
    align(align_options(corpus, tmp_path, "--runner=BundleBasedDirectRunner"))
    assert failed == [3, 20, 40]  # Beam gives up at the fourth
    assert digests(tmp_path) == digests(reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "call", "leaves_manifest"),
    [
        ("beam_jobs.align.bucket_blocks.key_of", 200, False),  # while reading
        ("beam_jobs.align.buckets.align_documents", 30, False),  # in the middle of a shard
        ("beam_jobs.storage.publish", 7, False),  # some shards have their final names
        ("beam_jobs.align.steps.encode_manifest", 1, False),  # all have, no manifest
        ("beam_jobs.align.dataset_making.close_run", 1, True),  # nothing is left but to clean up
        ("beam_jobs.storage.remove_folder", 1, True),  # nothing is left but a summary
    ],
)
def test_a_killed_job_then_a_second_start(
    tmp_path: Path, function: str, call: int, leaves_manifest: bool
) -> None:
    corpus, reference = reference_dataset()
    options = align_options(corpus, tmp_path)
    run_killed("beam_jobs.align.__main__", command_line(options), [function], call=call)
    assert run_folder(tmp_path).is_dir()
    assert (tmp_path / "manifest.json").exists() == leaves_manifest
    align(options)
    assert digests(tmp_path) == digests(reference)
    assert (tmp_path / "report.html").exists()


def test_a_runner_that_starts_the_job_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, reference = reference_dataset()
    counter = itertools.count()
    align_documents, run_job = vars(buckets)["align_documents"], dataset_making.run_job
    ends: list[int] = []

    def count(*arguments: Any, **keywords: Any) -> Any:
        next(counter)
        return align_documents(*arguments, **keywords)

    def run_twice(*arguments: Any, **keywords: Any) -> None:
        for _ in range(2):  # as Flink does: reading and all, with the same job
            run_job(*arguments, **keywords)
            assert (tmp_path / "manifest.json").exists()
            ends.append(next(counter))

    monkeypatch.setattr(buckets, "align_documents", count)
    monkeypatch.setattr(dataset_making, "run_job", run_twice)
    align(align_options(corpus, tmp_path))
    assert ends[0] > 2
    assert ends[1] == ends[0] + 1, "buckets were aligned again"
    assert digests(tmp_path) == digests(reference)
    assert not list(tmp_path.glob(".vocag-*/*"))


def test_changed_documents_are_aligned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus", num_documents=120)
    options = align_options(corpus, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(steps, "encode_manifest", fail)
        assert main(command_line(options)) == 1
    assert list((tmp_path / "out").glob("*.tar"))
    num_committed = len(list(run_folder(tmp_path / "out").glob("commit-*.json")))
    first = corpus.folder / "in" / "a.jsonl"
    data = first.read_bytes()
    first.write_bytes(data.replace(b"prime", b"emirp"))  # as large as before
    capsys.readouterr()
    assert main(command_line(options)) == 0
    reused = re.search(r"(\d+) parts? taken over", capsys.readouterr().out)
    assert reused is None or int(reused[1]) < num_committed
    align(align_options(corpus, tmp_path / "fresh"))
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_damaged_temporaries_and_abandoned_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, reference = reference_dataset()
    options = align_options(corpus, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "number_shards", fail)
        assert main(command_line(options)) == 1
    folder = run_folder(tmp_path)
    num_committed = len(list(folder.glob("commit-*.json")))
    tars = sorted(folder.glob("bucket-*.tar"))
    tars[0].write_bytes(tars[0].read_bytes()[:-1])
    tars[-1].unlink()
    (folder / "blocks-0.bin").write_bytes(b"texts that a killed attempt left")
    kept = ["corpus-notes.tar", "corpus2-000000-of-000001.tar"]
    for name in ("corpus-000000-of-000099.tar", "corpus-000000-of-000099.index.parquet", *kept):
        (tmp_path / name).write_bytes(b"of someone")
    assert main(command_line(options)) == 0
    assert f"{format_plural(num_committed - 2, 'part')} taken over" in capsys.readouterr().out
    for name in kept:
        (tmp_path / name).unlink()
    assert digests(tmp_path) == digests(reference)


def test_what_a_job_killed_at_its_very_end_left_is_removed(tmp_path: Path) -> None:
    corpus, _ = reference_dataset()
    options = align_options(corpus, tmp_path / "out")
    assert main(command_line(options)) == 0
    attempt = Attempt(open_input(options), configure(open_input(options)), PipelineOptions(), 0)
    Path(attempt.run_folder).mkdir()
    (tmp_path / "out" / OUTPUT_LOCK).write_text("{}")
    assert main(command_line(options)) == 0
    assert [path.name for path in (tmp_path / "out").glob(".*")] == []
    Path(attempt.run_folder).mkdir()
    with hold_lock(str(tmp_path / "out" / OUTPUT_LOCK), str(tmp_path / "out")):
        assert main(command_line(options)) == 0  # another job is at work: nothing is touched
        assert Path(attempt.run_folder).exists()


def test_two_finalisers_never_lose_a_shard(tmp_path: Path) -> None:
    scratch = tmp_path / "run"
    scratch.mkdir()
    final, temporary = tmp_path / "final.tar", scratch / "temporary.tar"
    data = os.urandom(1 << 16)
    temporary.write_bytes(data)

    def finalise(_: int) -> None:
        storage.publish(str(temporary), str(final), len(data), scratch=str(scratch))

    finalise(0)
    with ThreadPoolExecutor(3) as pool:
        published = [pool.submit(finalise, n) for n in range(900)]
        num_looks = 0
        while not all(each.done() for each in published):
            assert final.read_bytes() == data
            num_looks += 1
    assert num_looks > 0
    assert not [each.exception() for each in published if each.exception()]
    assert [path.name for path in scratch.iterdir()] == ["temporary.tar"]


def test_a_finaliser_may_come_late_but_not_find_nothing(tmp_path: Path) -> None:
    final = tmp_path / "final.tar"
    final.write_bytes(b"data")
    gone = str(tmp_path / "gone.tar")
    storage.publish(gone, str(final), 4, scratch=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds the 5 bytes that were written"):
        storage.publish(gone, str(final), 5, scratch=str(tmp_path))


def test_an_attempt_that_only_reports_does_not_count_as_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=[json_line("a", make_text(1))])
    monkeypatch.setattr(dataset_making, "write_report", fail)
    with pytest.raises(RuntimeError, match="injected"):
        align(align_options(corpus, tmp_path / "out"))
    monkeypatch.undo()
    capsys.readouterr()
    manifest = align(align_options(corpus, tmp_path / "out"), started=time.monotonic() - 5)
    said = capsys.readouterr().out
    assert "  start-up        0.0 s: " in said
    assert re.search(r"  aligning +[5-9]\.\d s: ", said)
    assert manifest.totals["num_documents"] > 0


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(storage.os, "link", refuse)  # type: ignore[attr-defined]
    corpus, reference = reference_dataset()
    align(align_options(corpus, tmp_path))
    assert digests(tmp_path) == digests(reference)


def test_notes_of_an_earlier_attempt_are_not_believed(tmp_path: Path) -> None:
    """A file that was repaired meanwhile was told to be unusable."""
    start_run(str(tmp_path), {"name": "a"})
    for name in ("unusable-ab-0.json", "lines-ab-0.json", "blocks-0", "commit-000000.json"):
        (tmp_path / name).write_text("[]")
    start_run(str(tmp_path), {"name": "a"})
    assert {path.name for path in tmp_path.iterdir()} == {
        "commit-000000.json",
        "configuration.json",
    }


@pytest.mark.parametrize("name", ["configuration.json", "summary.json"])
def test_a_cut_file_of_an_interrupted_run_is_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / ".vocag-0"
    start_run(str(folder), {"name": "a"})
    path = folder / name
    path.write_bytes(b'{\n "name": "a')
    expected = f"{path} is damaged (Unterminated string .*: delete the folder {folder}, "
    with pytest.raises(OptionsError, match=re.escape(expected).replace(r"\.\*", ".*")):
        find_finished(str(tmp_path), {"name": "a"}) if name[0] == "c" else read_left_file(str(path))


@pytest.mark.parametrize("call", [align, describe])
def test_a_folder_that_no_reader_would_find_is_refused(
    tmp_path: Path, call: Callable[[AlignOptions], object]
) -> None:
    """The job made its dataset there, and ended as its report was read."""
    output = f"{tmp_path}/a::b"
    with pytest.raises(OptionsError, match=f"--output {output}: readers take :: for a chain"):
        call(AlignOptions((f"{tmp_path}/*.jsonl",), output, "bytes", "bytes"))
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_of_another_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=[json_line("a", make_text(1))])
    with monkeypatch.context() as patch:
        patch.setattr(steps, "encode_manifest", fail)
        assert main(command_line(align_options(corpus, tmp_path / "out"))) == 1
    with pytest.raises(
        OptionsError, match="an unfinished run, configured differently: --t"
    ) as error:
        align(align_options(corpus, tmp_path / "out", text_field="id"))
    assert "--text-field is text there and id here; choose" in str(error.value)
    (hint,) = hints_of(error.value)
    assert hint.endswith("  # then run the same command again")
    subprocess.run(["sh", "-c", hint.removeprefix("hint: ")], check=True)
    align(align_options(corpus, tmp_path / "out", text_field="id"))
