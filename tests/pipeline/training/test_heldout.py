"""Held-out sets: which tokens of them a student is measured on, and which of their documents."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from beam_jobs.edit.remove import RemoveOptions, remove
from beam_jobs.views.command import add_view
from beam_jobs.views.options import ViewRequest
from pipeline.dataset.files import open_dataset
from pipeline.scoring.hf_models import load_language_model
from pipeline.streaming import Convention
from pipeline.training.config import TrainConfig
from pipeline.training.evaluation import bits_per_byte
from pipeline.training.loop import train
from pipeline.training.method import Method
from pipeline.training.models import heldout_views
from pipeline.training.ranks import Ranks
from schemas.errors import DatasetError, ForeignTokenizerError
from schemas.manifest import MANIFEST_FILE, encode_manifest
from tests.support.datasets import build_dataset, byte_level, make_texts
from tests.support.growing import QUIET
from tests.support.hf_folders import write_model

FIRST, OTHER = 400, 440


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training and held-out data aligned for one student, seen by views for another."""
    root = tmp_path_factory.mktemp("world")
    build_dataset(root / "data", make_texts(20))
    build_dataset(root / "heldout", make_texts(6, seed=1))
    build_dataset(root / "fresh", make_texts(6, seed=1), student=byte_level(OTHER))
    (root / "other.json").write_bytes(byte_level(OTHER).file_bytes)
    (root / "teacher.json").write_bytes(byte_level(FIRST).file_bytes)
    for folder, name in (("data", "one"), ("heldout", "two")):
        _add(root, folder, "student", "other", name)
    write_model(root / "student", byte_level(OTHER))
    return root


def _add(root: Path, folder: str, side: str, tokenizer: str, name: str) -> None:
    source = str(root / f"{tokenizer}.json")
    add_view(ViewRequest(str(root / folder), side, source, name, run=QUIET))  # type: ignore[arg-type]


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
        "view": "one",
        "heldout": (str(world / "heldout"),),
    }
    return TrainConfig(**{**values, **changes})  # type: ignore[arg-type]


def _measure(config: TrainConfig, path: Path, view: str = "") -> float:
    manifest = open_dataset(path, view=view).manifest
    convention = Convention.of_tokenizer(manifest.student, ends=True)
    student = load_language_model(config.student)
    alone = Ranks(torch.device("cpu"))
    return bits_per_byte(config, student, str(path), alone, convention, view=view)


def test_a_view_gives_the_bits_per_byte_of_a_fresh_alignment(world: Path, tmp_path: Path) -> None:
    """In rows that hold every document whole: rows are packed in another order."""
    config = _config(world, tmp_path, seq_length=512)
    found = _measure(config, world / "heldout", "two")
    assert found == pytest.approx(_measure(config, world / "fresh"), rel=1e-5)
    assert found > 0


def test_training_through_a_view_measures_through_one(world: Path, tmp_path: Path) -> None:
    """Found by its tokenizer; a set that has the tokens itself is read as it was aligned."""
    sets = (f"seen={world / 'heldout'}", f"own={world / 'fresh'}")
    config = _config(world, tmp_path, heldout=sets)
    manifest = open_dataset(world / "data", view="one").manifest
    assert heldout_views(config, manifest) == {"seen": "two", "own": ""}
    values = train(config)
    seen, own = (values[f"heldout_bits_per_byte/{name}"] for name in ("seen", "own"))
    assert seen == pytest.approx(own, rel=0.02)


def test_a_set_without_the_students_tokens_is_refused(world: Path, tmp_path: Path) -> None:
    build_dataset(tmp_path / "heldout", make_texts(6, seed=1))
    (tmp_path / "other.json").write_bytes((world / "other.json").read_bytes())
    _add(tmp_path, "heldout", "teacher", "other", "one")  # of that name, and on the other side
    config = _config(world, tmp_path, heldout=(str(tmp_path / "heldout"),))
    manifest = open_dataset(world / "data", view="one").manifest
    with pytest.raises(
        ForeignTokenizerError, match=r"or run vocag add-student .*heldout --student"
    ):
        heldout_views(config, manifest)


def test_a_view_that_is_not_complete_is_refused(world: Path, tmp_path: Path) -> None:
    whole = build_dataset(tmp_path / "heldout", make_texts(6, seed=1))
    path = tmp_path / "heldout" / MANIFEST_FILE
    path.write_bytes(encode_manifest(replace(whole, shards=whole.shards[:2])))
    (tmp_path / "other.json").write_bytes((world / "other.json").read_bytes())
    _add(tmp_path, "heldout", "student", "other", "two")
    views = open_dataset(tmp_path / "heldout").manifest.views
    path.write_bytes(encode_manifest(replace(whole, views=views)))
    config = _config(world, tmp_path, heldout=(str(tmp_path / "heldout"),))
    manifest = open_dataset(world / "data", view="one").manifest
    with pytest.raises(DatasetError, match="has files for 2 of 3 shards: the dataset has grown"):
        heldout_views(config, manifest)


def test_removed_documents_count_on_neither_side(world: Path, tmp_path: Path) -> None:
    """Their bytes were counted: a student looked better than it was."""
    texts = make_texts(6, seed=1)
    build_dataset(tmp_path / "all", texts, student=byte_level(OTHER))
    build_dataset(tmp_path / "rest", texts[2:], student=byte_level(OTHER))
    (tmp_path / "ids.txt").write_text("\n".join(name for name, _ in texts[:2]), "utf-8")
    remove(RemoveOptions(str(tmp_path / "all"), str(tmp_path / "ids.txt"), quiet=True))
    config = _config(world, tmp_path, seq_length=512)
    found, wanted = (_measure(config, tmp_path / name) for name in ("all", "rest"))
    assert found == pytest.approx(wanted, rel=1e-5)
