"""Held-out sets: which tokens of them a student is measured on, and which of their documents."""

from pathlib import Path

import pytest
import torch

from beam_jobs.remove.command import RemoveOptions, remove
from pipeline.dataset.files import open_dataset
from pipeline.models.hf_models import load_language_model
from pipeline.streaming import Convention
from pipeline.training.config import TrainConfig
from pipeline.training.evaluation import bits_per_byte
from pipeline.training.method import Method
from pipeline.training.models import require_same_student
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
        "data": str(world / "data"),
        "student": str(world / "student"),
        "output": output,
        "method": Method("full"),
        "num_steps": 2,
        "warmup_steps": 1,
        "seq_length": 64,
        "global_batch_size": 4,
    }
    return TrainConfig(**{**values, **changes})  # type: ignore[arg-type]


def _measure(config: TrainConfig, path: Path) -> float:
    manifest = open_dataset(path).manifest
    convention = Convention.of_tokenizer(manifest.student, ends=True)
    student = load_language_model(config.student)
    alone = Ranks(torch.device("cpu"))
    return bits_per_byte(config, student, str(path), alone, convention)


def test_a_set_without_the_students_tokens_is_refused(world: Path, tmp_path: Path) -> None:
    build_dataset(tmp_path / "heldout", make_texts(6, seed=1))
    config = _config(world, tmp_path, heldout=(str(tmp_path / "heldout"),))
    with pytest.raises(ForeignTokenizerError, match=r"run vocag align --input .*heldout --student"):
        require_same_student(config, open_dataset(world / "data").manifest)


def test_removed_documents_count_on_neither_side(world: Path, tmp_path: Path) -> None:
    """Their bytes were counted: a student looked better than it was."""
    texts = make_texts(6, seed=1)
    build_dataset(tmp_path / "all", texts, student=byte_level(VOCABULARY))
    build_dataset(tmp_path / "rest", texts[2:], student=byte_level(VOCABULARY))
    (tmp_path / "ids.txt").write_text("\n".join(name for name, _ in texts[:2]), "utf-8")
    remove(RemoveOptions(str(tmp_path / "all"), str(tmp_path / "ids.txt"), quiet=True))
    config = _config(world, tmp_path, seq_length=512)
    found, wanted = (_measure(config, tmp_path / name) for name in ("all", "rest"))
    assert found == pytest.approx(wanted, rel=1e-5)
