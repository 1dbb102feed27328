"""A dataset's life in an object store: each command leaves the bytes that it leaves in a folder."""

import json
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from pipeline.command_line.commands import COMMANDS, run_command
from tests.services.stores import ObjectStore, Session
from tests.support.corpus import NOT_COMPARED, digests
from tests.support.growing import options, write_input
from tests.support.killing import run_killed

pytestmark = pytest.mark.services

ALIGN = COMMANDS["align"][0]
INPUTS = {
    "a": [f"a{number}" for number in range(30)],  # no dead letter: their list is an empty object
    "b": [*(f"b{number}" for number in range(12)), "a7"],
}
FOLDER = "data [1]"
"""Nothing may take it for a pattern of names."""

GONE = ["a3", "b1", "b11"]

Step = tuple[str, list[str]]


def life(root: str, place: str, tokenizers: Path) -> dict[str, Step]:
    """Each step's command and arguments: inputs below `root`, the datasets in `place`."""
    data = f"{place}/aligned"
    align = [
        f"--output={data}", f"--student={tokenizers / 'student.json'}", "--metadata=source",
        f"--teacher={tokenizers / 'teacher.json'}", "--shard-bytes=16384",
        "--max-dead-letters=1",
    ]  # fmt: skip
    return {
        "align": ("align", [*align, f"--input={root}/in/a.jsonl"]),
        "append": ("align", ["--append", *align, f"--input={root}/in/b.jsonl"]),
        "remove": ("remove", [data, f"--ids={root}/ids.txt", "--quiet"]),
        "align anew": ("align", [f"--input={data}", f"--output={place}/clean", "--quiet"]),
    }


Left = tuple[dict[str, str], dict[str, bytes]]
"""What a step leaves: the digests of all files, and the datasets' cards."""


@dataclass(frozen=True)
class LocalLife:
    """The same in local folders: the root of inputs and tokenizers, and what each step left."""

    root: Path
    left: dict[str, Left]


@pytest.fixture(scope="session")
def local_life(tmp_path_factory: pytest.TempPathFactory) -> LocalLife:
    root = tmp_path_factory.mktemp("life")
    for name, ids in INPUTS.items():
        options(root, write_input(root / f"in/{name}.jsonl", ids))  # and the tokenizers
    (root / "ids.txt").write_text("".join(f"{name}\n" for name in GONE), "utf-8")
    left = {}
    for step, (command, arguments) in life(str(root), str(root / "data"), root).items():
        assert run_command([command, *arguments]) == 0
        cards = {path.parent.name: path.read_bytes() for path in root.rglob("README.md")}
        left[step] = digests(root / "data"), cards
    return LocalLife(root, left)


@dataclass(frozen=True)
class Place:
    """A folder of a store with the inputs in it, its steps, and a process that runs commands."""

    store: ObjectStore
    url: str
    steps: dict[str, Step]
    session: Session

    @property
    def folder(self) -> str:
        return f"{self.url}/{FOLDER}"

    @property
    def data(self) -> str:
        return f"{self.folder}/aligned"

    def run(self, step: str) -> subprocess.CompletedProcess[str]:
        command, arguments = self.steps[step]
        return self.session.run(COMMANDS[command][0], *arguments)

    def must(self, step: str) -> None:
        result = self.run(step)
        assert result.returncode == 0, f"{step}: {result.stdout}{result.stderr}"

    def left(self) -> Left:
        names = [name for name in self.store.list(self.folder) if name.endswith("README.md")]
        cards = {name.split("/")[0]: self.store.read(f"{self.folder}/{name}") for name in names}
        return self.store.digests(self.folder), cards

    def written(self) -> dict[str, tuple[str, ...]]:
        """Return when each object was written that a command which does nothing leaves alone."""
        files = self.store.files.find(self.folder, detail=True)
        times = {
            name: tuple(str(info[key]) for key in ("LastModified", "updated") if key in info)
            for name, info in files.items()
            if name.rpartition("/")[2] not in NOT_COMPARED
        }
        assert all(times.values())
        return times


@pytest.fixture
def place(store: ObjectStore, local_life: LocalLife) -> Iterator[Place]:
    name = uuid.uuid4().hex
    for path in (local_life.root / "ids.txt", *(local_life.root / "in").iterdir()):
        url = f"{store.url}/{name}/{path.relative_to(local_life.root)}"
        store.files.pipe_file(url, path.read_bytes())
    url = f"{store.url}/{name}"
    with store.session() as session:
        yield Place(store, url, life(url, f"{url}/{FOLDER}", local_life.root), session)


def test_every_command_leaves_the_bytes_of_a_local_folder(
    place: Place, local_life: LocalLife, tmp_path: Path
) -> None:
    read = partial(read_rows, place, tmp_path)
    first = None
    for step, left in local_life.left.items():
        place.must(step)
        assert place.left() == left, step
        dataset = "clean" if step == "align anew" else "aligned"
        check = place.session.run(COMMANDS["validate"][0], f"{place.folder}/{dataset}")
        assert check.returncode == 0, f"{step}: {check.stdout}{check.stderr}"
        before = place.written()
        place.must(step)
        assert place.written() == before, f"{step}, again: it does nothing"
        first = first or read("")
    assert first is not None
    going_on, anew = read(json.dumps(first["state"])), read("")
    assert going_on == first, "a run goes on with its generation's rows"
    assert anew["sha256"] != first["sha256"]
    assert set(local_life.left["align anew"][1]) == {"aligned", "clean"}


def read_rows(place: Place, cache: Path, state: str) -> dict[str, object]:
    url = place.data
    result = place.session.run("tests.services.rows", url, cache, state)
    assert result.returncode == 0, result.stderr
    told: dict[str, object] = json.loads(result.stdout)
    return told


def test_a_killed_append_is_resumed(place: Place, local_life: LocalLife) -> None:
    place.must("align")
    before = place.store.read(f"{place.data}/manifest.json")
    arguments, environment = place.steps["append"][1], place.store.environment
    publish = ["beam_jobs.storage.publish"]
    run_killed(ALIGN, arguments, publish, call=2, environment=environment)
    assert place.store.read(f"{place.data}/manifest.json") == before
    assert any("/commit-" in name for name in place.store.list(place.data))
    resumed = place.run("append")
    assert resumed.returncode == 0, resumed.stderr
    assert re.search("parts? taken over", resumed.stdout)
    assert place.left() == local_life.left["append"]


def test_another_job_is_waited_for_and_a_dead_one_is_not(
    place: Place, local_life: LocalLife
) -> None:
    place.must("align")
    before = place.left()
    lock = f"{place.data}/.align-lock"
    other = {"id": "x", "process": 1, "host": "elsewhere", "started": 0.0}
    write: Callable[[float], None] = lambda renewed: place.store.files.pipe_file(  # noqa: E731
        lock, json.dumps({**other, "renewed": renewed}).encode()
    )
    write(time.time())
    refused = place.run("append")
    assert refused.returncode == 2
    assert "process 1 on elsewhere" in refused.stderr
    assert f"once {lock} is deleted" in refused.stderr
    place.store.files.rm_file(lock)
    assert place.left() == before
    write(time.time() - 400)
    place.must("append")
    assert ".align-lock" not in place.store.list(place.data)
