"""What the tests of training share, a lab of datasets and models."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.streaming import Reading
from pipeline.training.config import TrainConfig
from pipeline.training.loop import train
from tests.support.datasets import (
    build_dataset,
    byte_level,
    make_texts,
)
from tests.support.hf_folders import write_model
from tests.support.training_runs import pair_config


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two vocabularies, one of one vocabulary, a student and a trained teacher."""
    root = tmp_path_factory.mktemp("lab")
    student, teacher = byte_level(400), byte_level(480)
    build_dataset(root / "pair", make_texts(40))
    build_dataset(root / "heldout", make_texts(6, seed=1))
    build_dataset(root / "same", make_texts(40), student=teacher, teacher=teacher)
    write_model(root / "student", student)
    write_model(root / "teacher_start", teacher, seed=1)
    changes = {"data": Reading(str(root / "same")), "student": str(root / "teacher_start")}
    lengths = {"num_steps": 30, "num_epochs": 20, "learning_rate": 1e-2}
    train(
        pair_config(root, root / "teacher_run", Method("full"), teacher=None, **changes, **lengths)
    )
    return root


@pytest.fixture(scope="session")
def student(lab: Path) -> PreTrainedModel:
    return load_language_model(str(lab / "student"))


@pytest.fixture(scope="session")
def teacher(lab: Path) -> PreTrainedModel:
    return load_language_model(str(lab / "teacher_run" / "model"))


@pytest.fixture(scope="session")
def six(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run of six steps, with everything that a run can write."""
    config = pair_config(
        lab,
        tmp_path_factory.mktemp("runs") / "six",
        Method("random"),
        heldout=(str(lab / "heldout"),),
        evaluate_every=2,
        export_every=2,
        tracker="tensorboard" if find_spec("tensorboard") else None,
    )
    train(config)
    return config
