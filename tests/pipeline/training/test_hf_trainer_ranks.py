"""GuidedTrainer in two processes, with DistributedDataParallel around the student."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.streaming import AlignedRows
from pipeline.training.guided import GuidedStudent
from pipeline.training.loop import train
from tests.support.guided_trainers import logged, trainer_of
from tests.support.killing import run_ranks
from tests.support.runs import read_log
from tests.support.scored_data import train_config


def _train_by_trainer(world: Path, output: Path) -> None:
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    settings |= {"save_strategy": "no", "adam_beta2": 0.95}
    trainer = trainer_of(world, output, settings=settings)
    trainer.train()
    if trainer.args.process_index == 0:
        (output / "losses.json").write_text(json.dumps(logged(trainer)))
        trainer.save_model(str(output / "model"))


@pytest.mark.slow
def test_accumulation_in_two_processes_is_a_step_of_vocag_train(
    world: Path, tmp_path: Path
) -> None:
    """Divided once by all kept tokens (Eq. 3): micro-batches keep different numbers of them."""
    (tmp_path / "two").mkdir()
    run_ranks(_train_by_trainer, world, tmp_path / "two")
    sizes = {"global_batch_size": 4, "micro_batch_size": 1}
    config = train_config(world, tmp_path / "own", stored_losses=("",), **sizes)
    train(config)
    own = read_log(tmp_path / "own")
    found = json.loads((tmp_path / "two/losses.json").read_text())
    assert found == pytest.approx([entry["loss"] for entry in own], rel=1e-5)
    saved, weights = (
        AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").state_dict()
        for run in ("two", "own")
    )
    for name, tensor in weights.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-5)
    rows, student = AlignedRows(config.stream), load_language_model(str(world / "student"))
    with torch.no_grad():
        guided = GuidedStudent(student, Method("teacher"))
        parts = [guided(rows.__getitems__([position])) for position in range(4)]
    mean_of_means = sum(float(part.loss_sum / part.num_tokens) for part in parts) / 4
    assert abs(mean_of_means / found[0] - 1) > 1e-4, "what the Trainer alone would take"


def _measure_by_trainer(world: Path, output: Path, settings: dict[str, Any]) -> None:
    trainer = trainer_of(world, output, settings=settings, heldout=str(world / "data"))
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.args.process_index == 0:
        found = [*logged(trainer), *logged(trainer, "kept_fraction"), loss]
        (output / "measured.json").write_text(json.dumps(found))
        trainer.save_model(str(output / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("dispatched", [False, True])
def test_two_processes_choose_and_measure_as_one(
    world: Path, tmp_path: Path, dispatched: bool
) -> None:
    """Where each reads its rows, and where the first hands them out."""
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
    settings: dict[str, Any] = {"per_device_train_batch_size": 1, "save_strategy": "no"}
    how = {"accelerator_config": {"dispatch_batches": dispatched}}
    run_ranks(_measure_by_trainer, world, tmp_path / "two", settings | how)
    _measure_by_trainer(world, tmp_path / "one", settings | {"gradient_accumulation_steps": 2})
    expected, found = (
        json.loads((tmp_path / run / "measured.json").read_text()) for run in ("one", "two")
    )
    assert found == pytest.approx(expected, rel=1e-5)
    weights, saved = (
        AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").state_dict()
        for run in ("one", "two")
    )
    for name, tensor in weights.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-4)
