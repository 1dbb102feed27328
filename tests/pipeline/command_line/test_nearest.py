"""What is pasted if a path isn't there."""

from pathlib import Path

import pytest

from pipeline.command_line.nearest import look_near, nearest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "demo" / "aligned set").mkdir(parents=True)
    (tmp_path / "demo" / "corpus.jsonl").touch()
    (tmp_path / "-models" / "smollm2").mkdir(parents=True)
    for other in ("smollm2", "llama3"):
        (tmp_path / "models" / other).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "found", "hint"),
    [
        ("demo/corpos.jsonl", "demo/corpus.jsonl", "demo/corpus.jsonl  # the nearest name"),
        ("dmeo/aligned_set/", "demo/aligned set", "'demo/aligned set'  # the nearest name"),
        ("~/demos", "~/demo", "~/demo  # the nearest name"),
        ("~/dmeo/aligned set", "~/demo/aligned set", "~/'demo/aligned set'  # the nearest name"),
        ("~/xyz", None, "ls ~"),
        ("-models/smolm2", "-models/smollm2", "./-models/smollm2  # the nearest name"),
        ("demo/xyz/corpus.jsonl", None, "ls demo"),
        ("./xyz", None, "ls ."),
        ("xyz", None, "ls ."),
        ("/xyz/corpus", None, "ls /"),
        ("demo/corpus.jsonl/xyz", None, "ls demo/corpus.jsonl"),
        ("demo/", None, "ls demo/"),
        ("models/llama2", None, "ls models"),
        ("models/smolm2", "models/smollm2", "models/smollm2  # the nearest name"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_relative_paths(path: str, found: str | None, hint: str) -> None:
    assert nearest(path) == found
    assert look_near(path) == hint


def test_whole_paths(folder: Path) -> None:
    assert nearest(f"{folder}/demo/corpus.json") == f"{folder}/demo/corpus.jsonl"
    assert look_near(f"{folder}/xyz/a") == f"ls {folder}"


def test_a_url_has_no_neighbours() -> None:
    assert nearest("gs://bucket/aligned") is None
