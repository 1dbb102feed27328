"""`hf://datasets/OWNER/NAME`, with the hub's own client and a hub on this machine."""

import errno
import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import run
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch

from beam_jobs.remove.removal import find_documents
from pipeline.command_line.commands import run_command
from pipeline.remote import first_contact
from pipeline.streaming import AlignedRows
from tests.pipeline.remote.test_hub import point_hub_at
from tests.support.corpus import NOT_COMPARED, fail
from tests.support.datasets import files_of, make_texts
from tests.support.hub_server import TOKEN, HubServer, serve_hub
from tests.support.scored_data import SEQ_LENGTH, score_arguments, stored_rows

pytestmark = pytest.mark.slow

PLACE = "team/aligned"
URL = f"hf://datasets/{PLACE}"


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A hub and an empty dataset there, which the client of this process asks."""
    caches = tmp_path_factory.mktemp("caches")
    # The client's waits between attempts.
    never_sleeps = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
    with pytest.MonkeyPatch.context() as patch, serve_hub() as hub:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(caches / "hf"))
        patch.setattr("huggingface_hub.utils._http.time", never_sleeps)
        patch.setattr(first_contact, "_answered", set())
        point_hub_at(hub.url, patch)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("HOME", str(caches))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        hub.put(PLACE, {})
        yield hub


@pytest.fixture
def hub(shared_hub: HubServer, capfd: pytest.CaptureFixture[str]) -> Iterator[HubServer]:
    """The same; whatever a test makes this process print, the token isn't in it."""
    shared_hub.requests.clear()
    yield shared_hub
    assert TOKEN not in "".join(capfd.readouterr())


@pytest.fixture(scope="module")
def inputs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, models, and in `local` what the jobs make of them in a folder."""
    root = shutil.copytree(world, tmp_path_factory.mktemp("inputs") / "world")
    shutil.rmtree(root / "data")
    lines = [json.dumps({"id": name, "text": text}) for name, text in make_texts(40)]
    (root / "texts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    call(*align_arguments(root, root / "data"))
    call("score", *score_arguments(root))
    return root


@pytest.fixture(scope="module")
def made(shared_hub: HubServer, inputs: Path) -> HubServer:
    """The hub with the dataset, aligned and scored there."""
    call(*align_arguments(inputs, URL))
    call("score", URL, *score_arguments(inputs)[1:])
    return shared_hub


def align_arguments(inputs: Path, output: object) -> list[object]:
    return [
        "align", "--input", inputs / "texts.jsonl", "--output", output, "--shard-bytes", 16384,
        "--student", inputs / "student", "--teacher", inputs / "teacher", "--name", "aligned",
    ]  # fmt: skip


def call(*arguments: object, status: int = 0) -> None:
    assert run_command([str(each) for each in arguments]) == status


def compared(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in NOT_COMPARED}


def test_jobs_leave_the_files_of_a_local_run_in_few_commits(
    made: HubServer, hub: HubServer, inputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commits = made.commits[PLACE]
    assert len(commits) == 5, "the empty one, and two for each job"
    aligned, scored = (list(commits[number][1]) for number in (1, 3))
    assert sum(name.endswith(".tar") for name in aligned) > 2
    assert "manifest.json" not in aligned, "whoever reads meanwhile finds no half a dataset"
    assert sum(name.endswith(".safetensors") for name in scored) > 2
    assert not [name for name in scored if re.fullmatch(r"teacher-.*\.json", name)]
    local = compared(files_of(inputs / "data"))
    assert {name.split("/")[0] for name in local} >= {"manifest.json", "tokenizers"}
    # A score manifest says where the teacher's files were, which is the same here.
    assert compared(made.files(PLACE)) == local
    call(*align_arguments(inputs, URL))
    call("score", URL, *score_arguments(inputs)[1:])
    shown = capfd.readouterr().out
    assert "is finished: the same input and options made it" in shown
    assert len(made.commits[PLACE]) == 5, "nothing has changed"
    assert "uploaded" not in shown


def test_what_is_there_is_validated_streamed_and_trained_from(
    made: HubServer, hub: HubServer, inputs: Path, tmp_path: Path
) -> None:
    made.faults["GET /datasets"] = [503, 429, 503]
    call("validate", URL, "--teacher", inputs / "teacher")
    assert not made.faults.pop("GET /datasets"), "asked again"

    hub.requests.clear()
    remote, local = stored_rows(URL), stored_rows(inputs / "data")
    assert len(remote) == len(local) > 10
    everything = range(len(local))
    found, expected = remote.__getitems__(everything), local.__getitems__(everything)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert whole_shards(hub) == 5
    hub.requests.clear()
    options = [
        "--student", inputs / "student", "--stored-losses", "teacher", "--method", "teacher",
        "--num-steps", 2, "--warmup-steps", 0, "--seq-length", SEQ_LENGTH,
        "--global-batch-size", 2, "--micro-batch-size", 2,
    ]  # fmt: skip
    logs = []
    for name, place in (("remote", URL), ("local", inputs / "data")):
        call("train", "--data", place, *options, "--output", tmp_path / name)
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        logs.append([{**json.loads(line), "seconds": 0} for line in lines])
    assert logs[0] == logs[1]
    assert len(logs[0]) == 2
    assert whole_shards(hub) == 0, "they are kept here"


def whole_shards(hub: HubServer) -> int:
    return sum(bool(re.search(r"\.tar bytes=0-", asked)) for asked in hub.requests)


def test_the_card_s_lines_read_it(made: HubServer, hub: HubServer) -> None:
    card = made.files(PLACE)["README.md"].decode()
    (lines,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert "this folder or its URL" in lines
    found: dict[str, object] = {}
    exec(lines.replace("this folder or its URL", URL), found)  # the lines that we have written
    rows = found["rows"]
    assert isinstance(rows, AlignedRows)
    assert rows[0]["input_ids"].shape == (2048,)


def test_hf_upload_is_all_it_takes_to_push_a_dataset(
    hub: HubServer, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    program = Path(sys.executable).with_name("hf")
    command = [program, "upload", "team/pushed", inputs / "data", ".", "--type", "dataset"]
    done = run([*command, "--private"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert hub.files("team/pushed") == files_of(inputs / "data")
    call("validate", "hf://datasets/team/pushed")


def test_inputs_lie_there(hub: HubServer, made: HubServer, inputs: Path, tmp_path: Path) -> None:
    lines = (inputs / "texts.jsonl").read_bytes().splitlines(keepends=True)
    parts = {"in/a.jsonl": lines[:9], "in/b/c/d.jsonl": lines[9:20], "in/[e].jsonl": lines[20:]}
    files = {name: b"".join(part) for name, part in parts.items()}
    hub.put("team/raw", {**files, "big.bin": b"x"})
    arguments = align_arguments(inputs, tmp_path / "files")
    folder = "hf://datasets/team/raw/in"  # `**/` may match no folder, and a name isn't a pattern
    arguments[1:3] = ["--input", f"{folder}/**/?.jsonl", "--input", f"{folder}/[e].jsonl"]
    call(*arguments)
    expected = files_of(inputs / "data")
    tars = [name for name in expected if name.endswith(".tar")]
    assert all((tmp_path / "files" / name).read_bytes() == expected[name] for name in tars)
    assert not [asked for asked in hub.requests if asked.endswith("big.bin")]


def test_a_dataset_there_is_aligned_anew(hub: HubServer, inputs: Path, tmp_path: Path) -> None:
    call(*align_arguments(inputs, tmp_path / "kept"), "--keep-text")
    hub.put("team/kept", files_of(tmp_path / "kept"))
    options = ["--student", inputs / "teacher", "--name", "anew", "--quiet"]
    for name, source in (("there", "hf://datasets/team/kept"), ("here", tmp_path / "kept")):
        call("align", "--input", source, "--output", tmp_path / name, *options)
    there, here = (files_of(tmp_path / name) for name in ("there", "here"))
    tars = [name for name in here if name.endswith(".tar")]
    assert tars
    assert [there[name] for name in tars] == [here[name] for name in tars]


def test_removed_documents_leave_a_generation_there(
    hub: HubServer, made: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next command names the repository: it would have written into the copies' folder."""
    hub.put("team/less", made.files(PLACE))
    ids = tmp_path / "ids.txt"
    ids.write_text("doc-0-3\n")
    call("remove", "hf://datasets/team/less", "--ids", ids, "--dry-run")
    assert len(hub.commits["team/less"]) == 1
    call("remove", "hf://datasets/team/less", "--ids", ids)
    clean = "--input hf://datasets/team/less --output hf://datasets/team/less-clean"
    assert f"next: vocag align {clean} " in capfd.readouterr().out
    assert json.loads(hub.files("team/less")["manifest.json"])["generation"] == 1
    call("validate", "hf://datasets/team/less")


def test_an_upload_that_was_killed_goes_on(
    hub: HubServer, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files but the manifests are there: no job would take that for its own work."""
    hub.put("team/cut", {})
    url = "hf://datasets/team/cut"
    upload, calls = huggingface_hub.HfApi.upload_folder, []

    def killed(*given: object, **options: object) -> object:
        calls.append(options)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return upload(*given, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.HfApi, "upload_folder", killed)
        call(*align_arguments(inputs, url), status=130)
    assert hub.files("team/cut")
    assert "manifest.json" not in hub.files("team/cut")
    call(*align_arguments(inputs, url))
    call("validate", url)


def test_a_copy_that_nobody_works_in_is_renewed_and_no_other(
    hub: HubServer, inputs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    url = "hf://datasets/team/moved"
    hub.put("team/moved", {})
    call(*align_arguments(inputs, url))
    hub.put("team/moved", {**hub.files("team/moved"), "README.md": b"# by somebody else"})
    score = ["score", url, *score_arguments(inputs)[1:]]
    with monkeypatch.context() as patch:
        patch.setattr("beam_jobs.score.job.summarise", fail)  # once it has scored
        with pytest.raises(RuntimeError, match="injected"):
            call(*score)
    hub.put("team/moved", {**hub.files("team/moved"), "README.md": b"# again"})
    call(*score, status=2)
    said = capfd.readouterr().err
    assert f"{url} has changed since an unfinished job copied it to" in said
    (remedy,) = re.findall(r"hint: rm -r (\S+)", said)
    assert (Path(remedy) / "README.md").read_text() == "# by somebody else"
    shutil.rmtree(remedy)
    call(*score)
    assert hub.files("team/moved")["README.md"] == b"# again"


def test_what_is_left_to_upload_isn_t_sent_over_somebody_s_change(
    hub: HubServer, inputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = "hf://datasets/team/shared"
    hub.put("team/shared", {})
    hub.faults["POST /api/datasets/team/shared/commit"] = [412]
    call(*align_arguments(inputs, url), status=2)
    hub.put("team/shared", {"manifest.json": b"{}"})
    capfd.readouterr()
    call(*align_arguments(inputs, url), status=2)
    said = capfd.readouterr().err
    assert f"{url} has changed since an unfinished job copied it to" in said
    assert "is of an older state, and can't be uploaded" in said
    assert hub.files("team/shared") == {"manifest.json": b"{}"}


@pytest.fixture
def grown(hub: HubServer, made: HubServer, tmp_path: Path) -> tuple[str, list[object]]:
    """A dataset there, and the command that removes a document."""
    name = f"team/{tmp_path.name}"
    hub.put(name, made.files(PLACE))
    (tmp_path / "ids.txt").write_text("doc-0-3\n")
    return name, ["remove", f"hf://datasets/{name}", "--ids", tmp_path / "ids.txt"]


def more_arguments(inputs: Path, url: str) -> list[object]:
    more = inputs / "more.jsonl"
    more.write_text(json.dumps({"id": "more", "text": "One more."}) + "\n")
    given = align_arguments(inputs, url)
    return ["align", "--append", "--input", more, *given[3:]]


def test_of_two_jobs_at_once_one_is_refused_and_works_later(
    hub: HubServer,
    inputs: Path,
    grown: tuple[str, list[object]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, remove = grown
    append = more_arguments(inputs, f"hf://datasets/{name}")

    def meanwhile(*given: object) -> object:
        call(*append, status=2)
        return find_documents(*given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("beam_jobs.remove.removal.find_documents", meanwhile)
        call(*remove)
    said = capfd.readouterr()
    assert f" writes to hf://datasets/{name}, in the copy" in said.err
    assert "wait until it has ended" in said.err
    assert "run the same command again to continue in" not in said.out
    assert json.loads(hub.files(name)["manifest.json"])["generation"] == 1
    call(*append)
    assert json.loads(hub.files(name)["manifest.json"])["generation"] == 2
    call("validate", f"hf://datasets/{name}")


def test_a_copy_on_a_file_system_without_locks_is_refused_with_the_remedy(
    grown: tuple[str, list[object]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The lock's error had no remedy, and the hub's client needs locks, too."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    name, remove = grown
    call(*remove, status=2)
    said = capfd.readouterr().err
    assert f"hf://datasets/{name} is copied to a file system without locks (No locks" in said
    assert "set XDG_CACHE_HOME and HF_HOME to folders on another one" in said
    monkeypatch.undo()
    call(*remove)


def test_another_machine_s_change_is_not_overwritten(
    hub: HubServer,
    grown: tuple[str, list[object]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, remove = grown

    def meanwhile(*given: object) -> object:
        hub.put(name, {**hub.files(name), "README.md": b"# by another machine"})
        return find_documents(*given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("beam_jobs.remove.removal.find_documents", meanwhile)
        call(*remove, status=2)
    said = capfd.readouterr().err
    assert f"{name} has changed since an unfinished job copied it to" in said
    assert "auth whoami" not in said
    assert hub.files(name)["README.md"] == b"# by another machine"
    (remedy,) = re.findall(r"hint: rm -r (\S+)  # then run the same command again", said)
    shutil.rmtree(remedy)
    call(*remove)
    assert json.loads(hub.files(name)["manifest.json"])["generation"] == 1


def test_a_refused_job_leaves_no_copy_that_blocks(
    hub: HubServer,
    grown: tuple[str, list[object]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, remove = grown
    (tmp_path / "unknown.txt").write_text("nobody\n")
    call(*remove[:3], tmp_path / "unknown.txt", status=2)
    assert "run the same command again" not in capfd.readouterr().out
    hub.put(name, {**hub.files(name), "README.md": b"# by somebody else"})
    call(*remove)
    assert json.loads(hub.files(name)["manifest.json"])["generation"] == 1


def test_an_answer_that_no_client_understands_is_explained(
    hub: HubServer, grown: tuple[str, list[object]], capfd: pytest.CaptureFixture[str]
) -> None:
    name, remove = grown
    hub.faults[f"GET /api/datasets/{name}"] = [302] * 9
    call(*remove, status=2)
    hub.faults.clear()
    said = capfd.readouterr().err
    assert f"hf://datasets/{name} can't be used (its client doesn't understand what it " in said
    assert "KeyError: 'id'" in said


def test_too_many_dead_letters_say_where_the_dataset_is(
    hub: HubServer, inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, texts = "hf://datasets/team/dead", tmp_path / "texts.jsonl"
    hub.put("team/dead", {})
    texts.write_text((inputs / "texts.jsonl").read_text("utf-8") + "no JSON\n", "utf-8")
    arguments = [
        texts if each == inputs / "texts.jsonl" else each for each in align_arguments(inputs, url)
    ]
    call(*arguments, "--max-dead-letters", 0, status=3)
    (place,) = re.findall(
        f"nothing is uploaded to {url}; run the same command again to continue in (.+)",
        capfd.readouterr().out,
    )
    assert (Path(place) / "manifest.json").is_file()
    assert hub.files("team/dead") == {}
    call(*arguments, "--max-dead-letters", 1)
    assert "manifest.json" in hub.files("team/dead")


def test_a_mixture_s_dataset_there_is_scored_alone(
    made: HubServer, hub: HubServer, inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mixture = f'[datasets.a]\npath = "{URL}"\n[[stages]]\nweights = {{ a = 1 }}\n'
    (tmp_path / "mix.toml").write_text(mixture)
    call("score", tmp_path / "mix.toml", *score_arguments(inputs)[1:], status=2)
    assert f"{URL} is scored alone, not as part of a mixture" in capfd.readouterr().err


def test_what_can_t_be_used_says_what_to_do(
    hub: HubServer, inputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(*align_arguments(inputs, "hf://datasets/team/none"), status=2)
    said = capfd.readouterr().err
    assert "hf://datasets/team/none can't be used (FileNotFoundError: " in said
    assert "hf repos create OWNER/NAME --type dataset" in said
    assert TOKEN not in said
    hub.put("team/contested", {})
    url = "hf://datasets/team/contested"
    hub.faults["POST /api/datasets/team/contested/commit"] = [412]
    call(*align_arguments(inputs, url), status=2)
    said = capfd.readouterr().err
    assert f"{url} can't be used (HfHubHTTPError: Client error '412" in said
    assert "run the same command again to upload it" in said
    assert TOKEN not in said
    call(*align_arguments(inputs, url))
    shown = capfd.readouterr().out
    assert "is finished" in shown
    assert f"uploaded to {url}: {hub.url}/datasets/team/contested/commit/" in shown
    assert "manifest.json" in hub.files("team/contested")
