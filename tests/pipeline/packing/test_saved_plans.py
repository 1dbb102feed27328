"""A plan travels with its dataset and decides what is read: altered or not, rows are the same."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from pipeline.command_line.folder_lock import NO_LOCKS
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.validate.dataset_checks import validate_dataset
from tests.support.datasets import build_dataset, make_texts, remove_documents

Warnings = pytest.LogCaptureFixture


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A dataset with a plan, and a digest of its rows."""
    folder = tmp_path_factory.mktemp("planned") / "data"
    build_dataset(folder, make_texts(30))
    return folder, rows_of(folder)


@pytest.fixture
def data(planned: tuple[Path, str], tmp_path: Path) -> Path:
    return shutil.copytree(planned[0], tmp_path / "data")


def open_rows(folder: Path, **options: Path) -> AlignedRows:
    return AlignedRows(StreamConfig(Reading(str(folder)), seq_length=64, window_rows=4, **options))


def rows_of(folder: Path, **options: Path) -> str:
    rows = open_rows(folder, **options)
    buffers = [rows[number].buffer.numpy().tobytes() for number in range(rows.samples_per_epoch)]
    assert len(buffers) > 20
    return sha256(b"".join(buffers)).hexdigest()


def plan_of(folder: Path) -> Path:
    (plan,) = (folder / "plans").glob("*-v1")
    return plan


def forge(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Alter an array of a plan, and let plan.json say that it is so."""
    plan = plan_of(folder)
    array, about = np.load(plan / f"{name}.npy"), json.loads((plan / "plan.json").read_text())
    array = changed if (changed := change(array)) is not None else array
    np.save(plan / f"{name}.npy", array)
    about["sha256"][name] = sha256((plan / f"{name}.npy").read_bytes()).hexdigest()
    (plan / "plan.json").write_text(json.dumps(about))


def require_made_again(folder: Path, rows: str, caplog: Warnings, why: str) -> None:
    """Check that a plan is made again with one warning, rows are the same, and then all is well."""
    (message,) = check_plans_of(folder)
    assert message.startswith("plans/")
    assert why in message
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert rows_of(folder) == rows
        assert rows_of(folder) == rows
    (warning,) = caplog.messages
    assert "is not used, but made again: " in warning
    assert why in warning
    assert check_plans_of(folder) == []


def check_plans_of(folder: Path) -> list[str]:
    report = validate_dataset(str(folder))
    assert {finding.check for finding in report.findings} <= {"plans"}
    return [finding.message for finding in report.findings]


def test_a_plan_that_is_sound_is_used_as_it_is(planned: tuple[Path, str], caplog: Warnings) -> None:
    folder, rows = planned
    before = {path: path.stat().st_mtime_ns for path in plan_of(folder).iterdir()}
    assert rows_of(folder) == rows
    assert {path: path.stat().st_mtime_ns for path in plan_of(folder).iterdir()} == before
    assert caplog.messages == check_plans_of(folder) == []


@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_a_flipped_bit_changes_no_row(data: Path, planned: tuple[Path, str], share: float) -> None:
    for path in sorted(plan_of(data).glob("*.npy")):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[int(share * len(whole))] ^= 4
        path.write_bytes(flipped)
        assert rows_of(data) == planned[1]
        assert path.read_bytes() == whole


def altered_segment(**values: int) -> Callable[[np.ndarray], None]:
    def change(segments: np.ndarray) -> None:
        for field, value in values.items():
            segments[field][3] = value

    return change


DIVIDED = "rows and windows don't divide its segments"
BEYOND = "has a segment beyond its document, or too many tokens"


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("segments", altered_segment(student_start=4_000_000_000), BEYOND),
        ("segments", altered_segment(student_stop=5_000, teacher_stop=5_000), BEYOND),
        ("segments", altered_segment(teacher_stop=4_000_000_000), BEYOND),
        ("segments", altered_segment(document=4_000_000_000), BEYOND),
        ("segments", altered_segment(flags=7), BEYOND),
        ("segments", lambda segments: segments["document"].copy(), "segments.npy holds uint32"),
        ("row_starts", lambda starts: np.append(starts[:2], starts[2:].clip(starts[3])), BEYOND),
        ("row_starts", lambda starts: starts[:-1], DIVIDED),
        ("row_starts", lambda starts: starts[::-1].copy(), DIVIDED),
        ("window_row_starts", lambda starts: starts + 1, DIVIDED),
        ("window_shards", lambda shards: shards + 3, DIVIDED),
        ("window_shards", lambda shards: shards[:-1], DIVIDED),
        ("shard_document_starts", lambda starts: starts * 2, "manifest's numbers of documents"),
        ("crc32", lambda column: column[:-1], "manifest's numbers of documents"),
    ],
)
def test_a_forged_plan_is_made_again(
    data: Path, planned: tuple[Path, str], caplog: Warnings, name: str, change: object, why: str
) -> None:
    forge(data, name, change)  # type: ignore[arg-type]
    require_made_again(data, planned[1], caplog, why)


@pytest.mark.parametrize("place", [11, 40, 43, 60])
def test_a_header_that_numpy_can_not_evaluate_is_made_again(
    data: Path, planned: tuple[Path, str], caplog: Warnings, place: int
) -> None:
    path = plan_of(data) / "crc32.npy"
    header = bytearray(path.read_bytes())
    header[place] = 0
    path.write_bytes(header)
    about = json.loads((plan_of(data) / "plan.json").read_text())
    about["sha256"]["crc32"] = sha256(header).hexdigest()
    (plan_of(data) / "plan.json").write_text(json.dumps(about))
    require_made_again(data, planned[1], caplog, "crc32.npy")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda about: about.update(fingerprint="0" * 64), "its fingerprint is 000"),
        (lambda about: about["rules"].update(seq_length=32), "its rules is Pack"),
        (lambda about: about.update(where="true"), "its where is true, not "),
        (lambda about: about.update(scores="a"), "its scores is a, not "),
        (lambda about: about.pop("sha256"), "missing required field `sha256`"),
        (lambda about: about["sha256"].pop("crc32"), "SHA-256 of crc32.npy isn't the one"),
        (lambda about: about["rules"].update(seq_length=1), "seq_length 1 is not in 4"),
    ],
)  # fmt: skip
def test_what_a_plan_was_made_for_is_compared(
    data: Path, planned: tuple[Path, str], caplog: Warnings, change: object, why: str
) -> None:
    path = plan_of(data) / "plan.json"
    about = json.loads(path.read_text())
    change(about)  # type: ignore[operator]
    path.write_text(json.dumps(about))
    report = validate_dataset(str(data))
    assert len([*report.findings, *report.notes]) == 1
    with caplog.at_level(logging.WARNING):
        assert rows_of(data) == planned[1]
    (warning,) = caplog.messages
    assert why in warning


def test_a_plan_beside_a_read_only_dataset_is_made_again_in_the_cache_folder(
    data: Path, planned: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.packing.saved_plans.os.access", lambda path, mode: False)
    assert rows_of(data, cache_folder=tmp_path / "c") == planned[1]
    assert not (tmp_path / "c").exists(), "the sound one next to it is used"
    path = plan_of(data) / "crc32.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert rows_of(data, cache_folder=tmp_path / "c") == planned[1]
    assert len(list((tmp_path / "c/plans").glob("*/plan.json"))) == 1


def test_validate_plans_again(data: Path) -> None:
    """A liar that hashes its lies: sound arrays that read one document twice, another never."""
    assert check_plans_of(data) == []
    forge(data, "crc32", lambda column: column[::-1].copy())
    (message,) = check_plans_of(data)
    assert "the dataset gives other crc32" in message


def test_plans_that_nobody_reads_are_noted(data: Path) -> None:
    plan = plan_of(data)
    remove_documents(data, "doc-0-3")
    rows_of(data)
    assert check_plans_of(data) == []  # one of each generation
    other = plan.rename(plan.with_name("0" * 16 + plan.name[16:]))
    about = json.loads((other / "plan.json").read_text())
    about["fingerprint"] = "0" * 64
    (other / "plan.json").write_text(json.dumps(about))
    report = validate_dataset(str(data))
    assert report.findings == ()
    (note,) = report.notes
    assert note.startswith(f"plans/{other.name} was not compared")
    assert note.endswith("the dataset has no such generation")


def test_nothing_else_is_in_the_folder(data: Path) -> None:
    (data / "plans/.left").mkdir()
    (data / "plans/x.lock").touch()
    assert check_plans_of(data) == []


def test_half_plans_of_killed_processes_go(planned: tuple[Path, str], data: Path) -> None:
    """They are as large as plans, and hidden; one that is being made stays."""
    plan = plan_of(data)
    old, new = (plan.with_name(f".{plan.name}-{suffix}") for suffix in ("wq_3e0x1", "7ab_2l9z"))
    for half in (old, new):
        half.mkdir()
        (half / "segments.npy").write_bytes(b"half")
    os.utime(old, (0, 0))
    shutil.rmtree(plan)
    assert rows_of(data) == planned[1]
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("number", sorted(NO_LOCKS))
def test_a_file_system_without_locks_is_no_reason_to_stop(
    data: Path, planned: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    shutil.rmtree(data / "plans")
    monkeypatch.setattr(fcntl, "flock", fail)
    assert rows_of(data) == planned[1]
    assert plan_of(data).is_dir()
