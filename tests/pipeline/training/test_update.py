"""An update that would ruin the weights isn't made; one that teaches nothing warns."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.losses.loss_checks import NonFiniteLossError, check_finite
from pipeline.methods.method import Method
from pipeline.training import loop
from pipeline.training.command import main
from pipeline.training.config import TrainConfig
from pipeline.training.loop import train
from pipeline.training.run_opening import open_training
from pipeline.training.update import NonFiniteGradientError
from tests.support.guided_trainers import data_of, trainer_of
from tests.support.killing import run_ranks
from tests.support.runs import read_log
from tests.support.scored_data import train_config

NOTHING = Method("random", keep_fraction=1e-6, unmapped="exclude")


def config_of(world: Path, output: Path, **changes: Any) -> TrainConfig:
    given = {"method": Method("full"), "num_steps": 5, "checkpoint_every": 2, **changes}
    return train_config(world, output, **given)


def overflow(student: torch.nn.Module, value: float, step: int) -> None:
    """Let a backward pass overflow, though all losses are finite; a micro-batch is a step here."""
    calls = count(1)
    weight = next(student.parameters())
    weight.register_hook(lambda gradient: gradient * value if next(calls) == step else gradient)


def overflow_when_loaded(patch: pytest.MonkeyPatch, value: float, step: int) -> None:
    def open_and_spoil(*given: Any, **named: Any) -> Any:
        opened = open_training(*given, **named)
        overflow(opened.student, value, step)
        return opened

    patch.setattr(loop, "open_training", open_and_spoil)


def require_good_checkpoint(output: Path, step: int) -> None:
    checkpoint = torch.load(output / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == step
    assert all(bool(weight.isfinite().all()) for weight in checkpoint["student"].values())
    assert not (output / "model").exists()
    assert [entry["step"] for entry in read_log(output)] == [1, 2, 3]


@pytest.mark.parametrize(("value", "num_steps"), [(math.inf, 4), (math.nan, 5)])
def test_a_gradient_that_isn_t_finite_changes_nothing(
    world: Path, tmp_path: Path, value: float, num_steps: int
) -> None:
    """In the last step, and in one that a checkpoint would follow."""
    config = config_of(world, tmp_path, num_steps=num_steps)
    refusal = r"step 4 \(rows 6 to 7 of the run, learning rate 0\.001\): the gradient's norm is "
    with pytest.MonkeyPatch.context() as patch:
        overflow_when_loaded(patch, value, 4)
        with pytest.raises(NonFiniteGradientError, match=refusal + "(inf|nan)"):
            train(config)
    require_good_checkpoint(tmp_path, 2)
    assert math.isfinite(train(config)["loss"]), "it goes on from there"


def _train_until_broken(arguments: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            overflow_when_loaded(patch, math.nan, 4)
        assert main(arguments) == 2


def _train_until_a_loss_is_broken(arguments: list[str]) -> None:
    own = loop._accumulate

    def accumulate(run: Any, loader: Any, step: int) -> Any:
        sums = own(run, loader, step)
        if step == 3:  # as a teacher's losses would be that only choose what is kept
            broken = torch.tensor([[math.nan]])
            check_finite({"teacher_losses": (broken, broken.isnan())})
        return sums

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(loop, "_accumulate", accumulate)
        assert main(arguments) == 2


def _train_by_trainer_until_a_loss_is_broken(world: Path, output: Path) -> None:
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = trainer_of(world, output, settings=settings | {"save_strategy": "no"})
    own, places = trainer.compute_loss, count()

    def compute_loss(*args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1" and next(places) == 2:  # not a step's last
            broken = torch.tensor([[math.nan]])
            check_finite({"teacher_losses": (broken, broken.isnan())})
        return own(*args, **options)

    trainer.compute_loss = compute_loss
    with pytest.raises(NonFiniteLossError, match=r"step 2 \(rows 4 to 7 of the run") as raised:
        trainer.train()
    name = "teacher_losses[0, 0] is nan" if os.environ["RANK"] == "1" else "of another rank"
    assert name in str(raised.value)


@pytest.mark.slow
def test_the_trainer_tells_all_processes_of_one_s_broken_loss(world: Path, tmp_path: Path) -> None:
    """The others waited for its gradients: until a time-out, on a GPU."""
    run_ranks(_train_by_trainer_until_a_loss_is_broken, world, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("work", [_train_until_broken, _train_until_a_loss_is_broken])
def test_all_processes_stop_at_one_s_fault(
    world: Path, tmp_path: Path, work: Callable[[list[str]], None]
) -> None:
    sizes = "--seq-length 64 --global-batch-size 2 --micro-batch-size 1 --num-steps 5"
    paths = ["--data", str(world / "data"), "--student", str(world / "student")]
    more = "--method full --warmup-steps 1 --checkpoint-every 2 --device cpu"
    run_ranks(work, [*paths, "--output", str(tmp_path), *sizes.split(), *more.split()])
    require_good_checkpoint(tmp_path, 2)


def test_an_explosion_names_the_learning_rate(world: Path, tmp_path: Path) -> None:
    message = r"step \d \(rows .*, learning rate 1e\+30\): .*; lower the learning rate"
    with pytest.raises(NonFiniteLossError, match=message):
        train(config_of(world, tmp_path / "own", learning_rate=1e30))
    settings = {"learning_rate": 1e30, "save_strategy": "no"}
    given = {"method": Method("full"), "data": data_of(world, stored_losses=None)}
    trainer = trainer_of(world, tmp_path / "trainer", settings=settings, **given)
    with pytest.raises(NonFiniteLossError, match=message):
        trainer.train()


def test_the_trainer_of_transformers_stops_as_well(world: Path, tmp_path: Path) -> None:
    given = {"method": Method("full"), "data": data_of(world, stored_losses=None)}
    trainer = trainer_of(world, tmp_path, settings={"max_steps": 5}, **given)
    overflow(trainer.model, math.nan, 4)
    refusal = r"step 4 \(rows 6 to 7 of the run, learning rate 0\.001\): the gradient's norm is nan"
    with pytest.raises(NonFiniteGradientError, match=refusal):
        trainer.train()
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.parameters())
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_run_that_keeps_nothing_says_so(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(config_of(world, tmp_path / "own", method=NOTHING, num_steps=2))
    assert [entry["loss"] for entry in read_log(tmp_path / "own")] == [None, None]
    trainer = trainer_of(
        world,
        tmp_path / "trainer",
        settings={"max_steps": 2, "save_strategy": "no"},
        method=NOTHING,
        data=data_of(world, stored_losses=None),
    )
    trainer.train()
    assert sum("a step kept no token" in message for message in caplog.messages) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_rates_that_would_ruin_the_weights_are_refused(
    world: Path, tmp_path: Path, value: float
) -> None:
    with pytest.raises(ValueError, match=rf"learning_rate={value} isn't a number from 0 on"):
        config_of(world, tmp_path, learning_rate=value)


def test_any_seed_of_64_bits_serves(world: Path, tmp_path: Path) -> None:
    """Dates and job numbers have more than 24 bits; shorter seeds keep their draws."""
    for seed in (0, 3407, 2**24 - 1, -1):
        assert loop._seed(seed, 5) == (seed << 40) + 5
    for seed in (20261125, 2**31 - 1, 2**64 - 1, -(2**63)):
        draws = [loop._seed(seed, draw) for draw in range(3)]
        assert len(set(draws)) == 3
        for draw in draws:
            torch.manual_seed(draw)
    long = config_of(world, tmp_path, seed=2**64 - 1, random_init=True, num_steps=2)
    assert math.isfinite(train(long)["loss"])
    with pytest.raises(ValueError, match=r"seed=18446744073709551616 has more than 64 bits"):
        replace(long, seed=2**64)
