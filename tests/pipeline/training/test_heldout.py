"""Held-out sets: which tokens of them a student is measured on, and which of their documents."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from beam_jobs.remove.options import RemoveOptions
from beam_jobs.remove.removal import remove
from pipeline.models.hf_models import load_language_model
from pipeline.packing.reading import Reading
from pipeline.streaming import AlignedRows
from pipeline.training.config import TrainConfig
from pipeline.training.evaluation import evaluate, open_heldout
from pipeline.training.loop import train
from pipeline.training.method import Method
from pipeline.training.ranks import Ranks
from schemas.errors import ForeignTokenizerError
from tests.support.datasets import build_dataset, byte_level, make_texts
from tests.support.hf_folders import write_model

VOCABULARY = 440


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training and held-out data aligned for one student."""
    root = tmp_path_factory.mktemp("world")
    build_dataset(root / "data", make_texts(20), student=byte_level(VOCABULARY))
    write_model(root / "student", byte_level(VOCABULARY))
    return root


def _config(world: Path, output: Path, **changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "data": Reading(str(world / "data")),
        "student": str(world / "student"),
        "output": output,
        "method": Method("full"),
        "num_steps": 2,
        "warmup_steps": 1,
        "seq_length": 64,
        "global_batch_size": 4,
    }
    return TrainConfig(**{**values, **changes})  # type: ignore[arg-type]


def test_a_set_without_the_students_tokens_is_refused(world: Path, tmp_path: Path) -> None:
    build_dataset(tmp_path / "heldout", make_texts(6, seed=1))
    config = _config(world, tmp_path, heldout=(str(tmp_path / "heldout"),))
    with pytest.raises(ForeignTokenizerError, match=r"run vocag align --input .*heldout --student"):
        open_heldout(config, AlignedRows(config.stream))


def test_removed_documents_count_on_neither_side(world: Path, tmp_path: Path) -> None:
    """Their bytes were counted: a student looked better than it was."""
    texts = make_texts(6, seed=1)
    build_dataset(tmp_path / "all", texts, student=byte_level(VOCABULARY))
    build_dataset(tmp_path / "rest", texts[2:], student=byte_level(VOCABULARY))
    (tmp_path / "ids.txt").write_text("\n".join(name for name, _ in texts[:2]), "utf-8")
    remove(RemoveOptions(str(tmp_path / "all"), str(tmp_path / "ids.txt"), quiet=True))
    sets = (str(tmp_path / "all"), str(tmp_path / "rest"))
    config = _config(world, tmp_path, seq_length=512, heldout=sets)
    student, opened = load_language_model(config.student), AlignedRows(config.stream)
    heldout = open_heldout(config, opened)
    found, wanted = evaluate(config, student, heldout, Ranks(torch.device("cpu"))).values()
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_run_opens_each_dataset_once(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh or resumed, however often it measures."""
    build_dataset(tmp_path / "heldout", make_texts(6, seed=1), student=byte_level(VOCABULARY))
    opened: Counter[str] = Counter()

    def read_whole(url: str) -> bytes:
        opened[url] += 1
        return Path(url).read_bytes()

    monkeypatch.setattr("pipeline.dataset.reading.read_whole", read_whole)
    changes = {"heldout": (str(tmp_path / "heldout"),), "num_steps": 4, "evaluate_every": 1}
    for stop in (2, 4):
        opened.clear()
        train(_config(world, tmp_path / "run", **changes, exit_after=stop))
        manifests = {url: count for url, count in opened.items() if url.endswith("manifest.json")}
        assert manifests == {
            f"{folder}/manifest.json": 1 for folder in (world / "data", tmp_path / "heldout")
        }
