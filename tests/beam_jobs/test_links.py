"""Links in a stranger's dataset: nothing is written where they lead."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from beam_jobs.align.command import align
from beam_jobs.remove.options import RemoveOptions
from beam_jobs.remove.removal import remove
from beam_jobs.storage import open_shard_to_write, open_to_write, write_atomically
from pipeline.command_line.commands import run_command
from pipeline.command_line.links import LinkError
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.streaming.damage import DamageLog, QuarantinedSample
from tests.support import growing
from tests.support.datasets import files_of
from tests.support.scored_data import score_arguments


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grown")
    growing.grow(root, "first", ["a1", "a2", "b3"])
    return root


@pytest.fixture
def root(grown: Path, tmp_path: Path) -> Path:
    return shutil.copytree(grown, tmp_path / "root")


def take_out(root: Path) -> None:
    (root / "ids.txt").write_text("a1\n")
    remove(RemoveOptions(str(root / "aligned"), str(root / "ids.txt"), quiet=True))


def append(root: Path) -> None:
    inputs = growing.write_input(root / "in" / "more.jsonl", ["c1"])
    align(growing.options(root, inputs, append=True))


def plan(root: Path) -> None:
    AlignedRows(StreamConfig(Reading(str(root / "aligned")), seq_length=64, window_rows=4))


def link(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target, dirs_exist_ok=True)
        shutil.rmtree(path)
    path.symlink_to(target)


@pytest.mark.parametrize("name", [".align-lock", "manifests", "tokenizers/teacher", "plans"])
@pytest.mark.parametrize("command", [take_out, append])
def test_a_job_writes_through_no_link(
    root: Path, name: str, command: Callable[[Path], None]
) -> None:
    precious = root / "precious"
    precious.mkdir()
    (precious / "key").write_text("mine")
    target = precious / "key" if name == ".align-lock" else precious
    link(root / "aligned" / name, target)
    before = files_of(root)
    with pytest.raises(LinkError, match=rf"aligned/{name} is a symbolic link to {target}, and"):
        command(root)
    after = files_of(root)
    assert {path: after[path] for path in before} == before
    assert not after.keys() - before.keys() - {"ids.txt", "in/more.jsonl"}
    (root / "aligned" / name).unlink()
    if name != "tokenizers/teacher":  # without which it is no dataset
        command(root)


@pytest.mark.parametrize("name", ["", "{}.lock", "{}"])
def test_a_plan_is_written_through_no_link(root: Path, name: str) -> None:
    plan(root)
    plans = root / "aligned" / "plans"
    (own,) = plans.glob("*-v1")
    target = root / "precious"
    shutil.rmtree(plans)
    if name == "{}.lock":
        target.write_text("mine")
    else:
        target.mkdir()
    if name:
        plans.mkdir()
    (plans / name.format(own.name) if name else plans).symlink_to(target)
    before = files_of(root)
    with pytest.raises(LinkError, match=r"aligned/plans.* is a symbolic link to"):
        plan(root)
    assert files_of(root) == before


def test_what_is_left_out_is_listed_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "plan.jsonl").symlink_to(tmp_path / "mine")
    sample = QuarantinedSample("a.tar", "", "a", 1, "cut")
    with pytest.raises(LinkError, match=r"plan\.jsonl is a symbolic link"):
        DamageLog("quarantine", tmp_path / "plan.jsonl").note(0, sample, ValueError())
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("target", ["mine", "not there"])
@pytest.mark.parametrize("write", [open_to_write, open_shard_to_write])
def test_a_file_is_written_in_the_place_of_no_link(
    tmp_path: Path, write: Callable[[str], object], target: str
) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(LinkError, match="vocag would write there"):
        write(str(tmp_path / "link"))
    # A file that is renamed into place takes the place of the link, not of what it names.
    write_atomically(str(tmp_path / "link"), b"ours", scratch=str(tmp_path))
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "not there").exists()


def test_scores_are_written_through_no_linked_folder(
    unscored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["score", *score_arguments(unscored)]
    assert run_command(arguments) == 0
    precious = unscored / "precious"
    precious.mkdir()
    for path in (unscored / "data").glob("*teacher-*"):
        path.unlink()
    # Whoever made the dataset can foretell the name, which a configuration's hash is.
    (unscored / "data" / "elsewhere").symlink_to(precious)
    assert run_command(arguments) == 2
    assert "data/elsewhere is a symbolic link to" in capsys.readouterr().err
    assert not list(precious.iterdir())


def test_a_dataset_of_links_to_files_can_be_worked_on(root: Path) -> None:
    """As the hub's cache has it."""
    aligned, blobs = root / "aligned", root / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(aligned.glob("*.*"))):
        if path.is_file():
            path.rename(blobs / str(number))
            path.symlink_to(blobs / str(number))
    before = files_of(blobs)
    take_out(root)
    append(root)
    plan(root)
    assert files_of(blobs) == before
    assert set(growing.documents(aligned)) == {"a2", "b3", "c1"}
