"""How the experiment of docs/evidence.md runs its commands, counts arithmetic and keeps records."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prove.arms import SCALES, arms_of
from prove.collect import command_lines, thinned_logs
from prove.commands import Command, only_one, perform
from prove.compute import equal_steps, read_weights, training_cost
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
    with only_one(folder) as running, tqdm(total=9, disable=None) as bar:
        perform(folder, chains, bar, jobs=jobs, settings={}, running=running)
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


_DRIVER = """
import sys; sys.path.append({examples!r})
from pathlib import Path
from tqdm import tqdm
from prove.commands import Command, only_one, perform
folder = Path({folder!r})
wait = "import os, signal; open('begun', 'w').write(str(os.getpid())); signal.pause()"
with only_one(folder) as running, tqdm(total=1) as bar:
    perform(folder, [[Command("wait", ["-c", wait])]], bar, jobs=2, settings={{}}, running=running)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_run_that_ends_takes_its_commands_along_or_keeps_others_out(
    tmp_path: Path, is_asked: bool
) -> None:
    os.mkfifo(tmp_path / "begun")
    script = _DRIVER.format(examples=str(EXAMPLES), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    command = int((tmp_path / "begun").read_text())
    process.send_signal(signal.SIGTERM if is_asked else signal.SIGKILL)
    assert process.wait() != 0
    assert not (tmp_path / "done" / "wait.json").exists()
    if is_asked:
        with only_one(tmp_path):  # the lock is free: no process is left that inherited it
            return
    try:
        with pytest.raises(SystemExit, match="a killed one has left"), only_one(tmp_path):
            pass
    finally:
        os.kill(command, signal.SIGKILL)


def test_arithmetic_is_what_torch_counts_but_for_attention(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", byte_level(400))
    weights, model = read_weights(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert weights.output == model.get_output_embeddings().weight.numel()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for name, n in counts.items() if "attention" not in str(name))
    assert products == 4 * training_cost(weights)


def test_equal_steps_pay_for_the_same() -> None:
    assert equal_steps(400, 144.4, 155.7) == 371
    assert equal_steps(400, 381.1, 155.7) == 979


def test_records_hold_every_command_without_the_machines_folders(tmp_path: Path) -> None:
    folder = tmp_path / "prove"
    text = ["examples/prove/corpus.py", "--data", "/data/of/mine", "--output", folder / "text"]
    for name, words in (("text", text), ("runs/a", ["-m", "x", folder / "noisy", "/data/of/mine"])):
        record = folder / "done" / f"{name}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        line = " ".join(map(str, ["/usr/bin/python3", *words]))
        record.write_text(json.dumps({"command": line, "seconds": 1.0}))
    assert sorted(command_lines(folder)) == [
        "python -m x prove/noisy benchmarks",
        "python examples/prove/corpus.py --data benchmarks --output prove/text",
    ]
    log = folder / "runs" / "a" / "log.jsonl"
    log.parent.mkdir(parents=True)
    steps = [{"step": step, "loss": 1.0, "seconds": 2.0} for step in range(1, 42)]
    steps[-1]["heldout_bits_per_byte"] = 3.0
    log.write_text("\n".join(map(json.dumps, steps)))
    kept = [json.loads(line) for line in thinned_logs(folder)]
    assert [step["step"] for step in kept] == [20, 40, 41]
    assert kept[-1] == {"run": "runs/a", "step": 41, "loss": 1.0, "heldout_bits_per_byte": 3.0}


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
