"""How the experiment of docs/evidence.md runs its commands, counts arithmetic and keeps records."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prove.arms import SCALES, arms_of
from prove.commands import Command, only_one, perform
from prove.compute import read_weights, training_cost
from prove.recipe import Experiment, stages, steps_of, write_costs
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def _writes(name: str, *, needs: Path | None = None, fails: bool = False) -> Command:
    """A command that appends its name to a file, and wants another file first."""
    needed = "" if needs is None else f"open({str(needs)!r}); "
    status = 7 if fails else 0
    program = f"{needed}open('calls', 'a').write('{name} '); raise SystemExit({status})"
    return Command(name, ["-c", program])


def _perform(folder: Path, chains: list[list[Command]], jobs: int = 1) -> float:
    with only_one(folder) as lock, tqdm(total=9, disable=None) as bar:
        perform(folder, chains, bar, jobs=jobs, settings={}, lock=lock)
        return float(bar.n)


def test_commands_run_once_and_in_their_chains_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = tmp_path / "done" / "a" / "first.json"
    spare = tmp_path / "checkpoint.pt"  # nobody needs it once the command is done
    spare.touch()
    chains = [
        [_writes("a/first"), _writes("a/second", needs=needed)],
        [replace(_writes("b"), spare=spare)],
    ]
    _perform(tmp_path, chains, jobs=2)
    assert not spare.exists()
    calls = Path("calls").read_text().split()
    assert sorted(calls) == ["a/first", "a/second", "b"]
    assert set(json.loads(needed.read_text())) == {"command", "seconds"}
    _perform(tmp_path, chains)
    assert Path("calls").read_text().split() == calls


def test_a_failure_names_its_log_and_what_is_left_is_done_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"ended with 7: see .*bad\.log"):
        _perform(tmp_path, [[_writes("good"), _writes("bad", fails=True), _writes("never")]])
    assert Path("calls").read_text().split() == ["good", "bad"]
    _perform(tmp_path, [[_writes("good"), _writes("bad"), _writes("never")]])
    assert Path("calls").read_text().split() == ["good", "bad", "bad", "never"]
    accepted = replace(_writes("gate", fails=True), accepted=(0, 7))
    _perform(tmp_path, [[accepted]])
    assert accepted.record(tmp_path).exists()


def test_a_command_that_was_left_keeps_others_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "end")
    with only_one(tmp_path) as lock:
        left = subprocess.Popen(["cat", str(tmp_path / "end")], pass_fds=(lock,))
    with pytest.raises(SystemExit, match="a killed one has left"), only_one(tmp_path):
        pass
    (tmp_path / "end").write_text("")
    assert left.wait() == 0
    with only_one(tmp_path):
        pass


def test_arithmetic_is_what_torch_counts_but_for_attention(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", byte_level(400))
    weights, model = read_weights(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert weights.output == model.get_output_embeddings().weight.numel()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for name, n in counts.items() if "attention" not in str(name))
    assert products == 4 * training_cost(weights)


@pytest.mark.parametrize("name", SCALES)
def test_every_command_has_a_name_of_its_own(name: str, tmp_path: Path) -> None:
    scale = SCALES[name]
    chains = stages(Experiment(tmp_path, tmp_path, scale, 1)).values()
    names = [command.name for of_stage in chains for chain in of_stage for command in chain]
    assert len(set(names)) == len(names)
    assert scale.warmup_steps < scale.steps // 4
    num_runs = sum(len(arm.seeds) for arm in arms_of(scale))
    assert sum(name.endswith("/measures") for name in names) == num_runs


def test_costs_wait_for_texts_whose_alignment_was_killed(tmp_path: Path) -> None:
    own = Experiment(tmp_path, tmp_path, SCALES["full"], 1)
    for record in ("healed", "clean"):
        (tmp_path / "done").mkdir(exist_ok=True)
        (tmp_path / "done" / f"{record}.json").touch()
    (tmp_path / "noisy").mkdir()  # and no manifest in it
    own.healed.mkdir(parents=True)
    write_costs(own)
    assert not (tmp_path / "costs.json").exists()
    assert {steps_of(own, arm) for arm in arms_of(own.scale)} == {own.scale.steps}
