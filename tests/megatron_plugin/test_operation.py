"""Runs end, stop, resume and fail as a whole."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("megatron.core")

from megatron_plugin.bridge import START_TIMEOUT
from megatron_plugin.export_command import ExportOptions
from megatron_plugin.export_hf import export_student
from megatron_plugin.models.weight_sources import checkpoint_args, newest_iteration, open_weights
from megatron_plugin.teacher.world import serve
from pipeline.command_line.failures import hints_of
from pipeline.command_line.option_parsing import parse_options
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from schemas.index import decode_index
from tests.megatron_plugin.forked_ranks import ROOT, job_environment
from tests.megatron_plugin.models import save_model
from tests.megatron_plugin.reference_step import document_losses
from tests.megatron_plugin.training_job import (
    GLOBAL_BATCH,
    PIPELINE,
    SEED,
    SEQ_LENGTH,
    TRAINER,
    arguments,
    merged,
    train,
)

pytestmark = pytest.mark.slow

TWO_WORLDS = {"vocag_teacher_world_size": 1}
ALONE = {"vocag_teacher": None, "vocag_method": "full"}
# torchrun waits for processes that are ending; a loaded machine takes its time.
ENDS_WITHIN_SECONDS = 600


@pytest.fixture(scope="module")
def interrupted(inputs, tmp_path_factory):
    """A run of 6 steps that stopped after 3: its folder."""
    folder = tmp_path_factory.mktemp("interrupted")
    first = train(
        inputs,
        3,
        folder / "first",
        train_iters=6,
        exit_interval=3,
        save=folder / "checkpoint",
        save_interval=3,
        vocag_scope="group",
        tensorboard_dir=folder / "tensorboard",
        # After the last step: of the weights that are saved.
        vocag_validation_data=inputs.validation,
        eval_interval=3,
        eval_iters=1,
        **PIPELINE,
        **TWO_WORLDS,
    )
    assert "iteration        3/       6" in first.stdout
    assert "iteration        4/       6" not in first.stdout
    (validated,) = (line for line in first.stdout.splitlines() if "validation loss at" in line)
    assert "lm loss value" in validated
    assert "guided loss value" in validated
    return folder


@pytest.fixture(scope="module")
def exported(interrupted, tmp_path_factory):
    """The student that the run saved, as a folder of transformers."""
    folder = tmp_path_factory.mktemp("exported") / "student"
    export_student(interrupted / "checkpoint", folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(inputs, tmp_path_factory):
    """The weights after 6 steps in one run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(inputs, 3, folder, train_iters=6, vocag_scope="group", **PIPELINE, **TWO_WORLDS)
    return merged(folder, "weights", inputs.student)


def test_three_and_three_steps_are_six_bit_for_bit(inputs, interrupted, uninterrupted, tmp_path):
    # Also where another process of each rank reads its rows.
    again = resume(inputs, interrupted, tmp_path, 3, num_workers=1, **PIPELINE, **TWO_WORLDS)
    assert all(torch.equal(uninterrupted[name], again[name]) for name in uninterrupted)
    three = merged(interrupted / "first", "weights", inputs.student)
    assert any(not torch.equal(uninterrupted[name], three[name]) for name in three)


def test_a_run_that_is_started_again_at_every_step_is_the_same(inputs, tmp_path):
    """Random choices, order and optimizer: each start takes one step."""
    options = {"train_iters": 4, "vocag_method": "random", "vocag_teacher": None}
    train(inputs, 1, tmp_path / "whole", **options)
    again = {"save": tmp_path / "checkpoint", "load": tmp_path / "checkpoint", "exit_interval": 1}
    for step in range(1, 5):
        done = train(inputs, 1, tmp_path / f"step{step}", save_interval=1, **options, **again)
        assert f"iteration        {step}/       4" in done.stdout
    whole, last = (
        merged(tmp_path / name, "weights", inputs.student) for name in ("whole", "step4")
    )
    assert all(torch.equal(whole[name], last[name]) for name in whole)


def test_a_run_by_samples_takes_its_whole_steps(inputs, tmp_path):
    """As Megatron counts them; what they left over ended the run before its first one."""
    samples = {"train_iters": None, "train_samples": 2 * GLOBAL_BATCH + 4, "exit_interval": 1}
    again = {"save": tmp_path, "load": tmp_path, "save_interval": 100}
    for step in (1, 2):
        done = train(inputs, 1, **samples, **again, **ALONE)
        assert f"iteration        {step}/       2" in done.stdout
        assert f"iteration        {3 - step}/       2" not in done.stdout


def test_a_run_goes_on_in_another_layout(inputs, interrupted, uninterrupted, tmp_path):
    # Two rows share a choice of tokens: before a micro-batch's, now those of two replicas.
    again = resume(inputs, interrupted, tmp_path, 2, micro_batch_size=1)
    for name, weight in uninterrupted.items():
        # Adam's steps of 1e-3 amplify rounding where a gradient is nearly 0.
        torch.testing.assert_close(again[name], weight, rtol=0, atol=1e-4, msg=name)


def test_a_run_goes_on_with_its_checkpoints_arguments(inputs, interrupted, uninterrupted, tmp_path):
    """The teacher's ranks, which Megatron doesn't check, read them, too."""
    own = dict.fromkeys(("use_checkpoint_args", "use_mp_args_from_checkpoint_args"), "")
    again = resume(inputs, interrupted, tmp_path, 3, seq_length=None, **own, **TWO_WORLDS)
    assert all(torch.equal(uninterrupted[name], again[name]) for name in uninterrupted)


def resume(inputs, interrupted, dump, num_ranks, **options):
    """Take steps 4 to 6; return the weights."""
    load = interrupted / "checkpoint"
    done = train(inputs, num_ranks, dump, train_iters=6, load=load, vocag_scope="group", **options)
    assert "iteration        4/       6" in done.stdout
    assert "iteration        3/       6" not in done.stdout
    return merged(dump, "weights", inputs.student)


def test_a_hint_for_another_output_can_be_pasted(interrupted, exported):
    with pytest.raises(FileExistsError) as refused:
        export_student(interrupted / "checkpoint", exported)
    (hint,) = hints_of(refused.value)
    own = shlex.split(hint.removeprefix("hint: vocag export "))
    assert parse_options(ExportOptions, own, prog="vocag export").output.name == "student-2"


def test_export_is_what_megatron_holds(inputs, interrupted, exported):
    held = merged(interrupted / "first", "weights", inputs.student)
    weights = open_weights(str(exported))
    assert weights.tensors.keys() == held.keys()
    assert all(torch.equal(weights.open(name)[:], tensor) for name, tensor in held.items())
    model, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(model.get_input_embeddings().weight, held["model.embed_tokens.weight"])


def test_an_exported_student_writes_as_the_one_that_the_run_started_from(
    inputs, interrupted, tmp_path, monkeypatch
):
    """Chat template, ends and sampling; its three configurations name the same tokens."""
    args = checkpoint_args(newest_iteration(interrupted / "checkpoint"))
    assert args.vocag_student == str(inputs.student)
    student = shutil.copytree(inputs.student, tmp_path / "student")
    (student / "tokenizer_config.json").write_text('{"chat_template": "{{ eos_token }}"}')
    (student / "generation_config.json").write_text('{"eos_token_id": [1, 5], "top_p": 0.9}')
    args.vocag_student = str(student)
    monkeypatch.setattr("megatron_plugin.export_hf.checkpoint_args", lambda _: args)
    export_student(interrupted / "checkpoint", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    # In a folder of its own: transformers would change it next to a Qwen2 model.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported" / "tokenizer")
    assert tokenizer.chat_template == "{{ eos_token }}"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [1, 5]
    assert (tokenizer.eos_token_id, model.generation_config.top_p) == (1, 0.9)
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_an_exported_checkpoint_is_evaluated(exported, tmp_path, capfd):
    """Its own tokenizer is asked, which transformers would change next to it."""
    pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")
    from pipeline.evaluation.command import main as evaluate

    data = ROOT / "tests" / "data" / "evaluation"
    command = [str(exported), "--data", str(data), "--output", str(tmp_path)]
    command += ["--tasks", "svamp", "mmlu_stem", "--limit", "1", "--device", "cpu"]
    assert evaluate(command) == 0
    assert "SVAMP, text, 1 items: text b/B" in capfd.readouterr().out


def test_exported_losses_are_those_of_megatron(interrupted, exported):
    model = AutoModelForCausalLM.from_pretrained(exported)
    (last_stage,) = (interrupted / "first").glob("validation-*.pt")
    held = torch.load(last_stage)
    with torch.no_grad():
        losses = document_losses(
            model, *(held["rows"][name] for name in ("input_ids", "labels", "cu_seqlens"))
        )
    counted = held["rows"]["loss_mask"].bool()
    assert counted.sum() > SEQ_LENGTH
    torch.testing.assert_close(losses[counted], held["losses"][counted], rtol=0, atol=1e-5)


def test_a_teachers_nan_is_named(inputs, tmp_path):
    rows = AlignedRows(StreamConfig(Reading(str(inputs.data)), seq_length=SEQ_LENGTH))
    token = int(rows[0]["teacher_input_ids"][1])
    model = AutoModelForCausalLM.from_pretrained(inputs.teacher)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    model.save_pretrained(tmp_path / "teacher")
    failed = train(inputs, 2, check=False, vocag_teacher=tmp_path / "teacher", **TWO_WORLDS)
    assert failed.returncode
    assert re.search(
        r'NaN or infinite \(document "doc-0-\d+", sample \w+ in docs-.*, step 1 on', failed.stdout
    )


def test_metrics_reach_tensorboard(interrupted):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(interrupted / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    wanted = {"kept_fraction", "mapped_fraction", "teacher_loss", "student_loss_kept", "threshold"}
    wanted |= {"teacher_wait_ms", "quarantined_tokens"}
    assert {f"vocag/{name}" for name in wanted} | {"lm loss", "guided loss"} <= tags
    kept = [event.value for event in events.Scalars("vocag/kept_fraction")]
    assert len(kept) == 3
    assert all(0.3 < value < 0.5 for value in kept)


def test_finetune_starts_a_new_run_from_the_weights(inputs, interrupted, tmp_path):
    start = {"load": interrupted / "checkpoint", "finetune": "", "lr": 0, "min_lr": 0}
    done = train(inputs, 1, tmp_path, **ALONE, **start)
    assert "iteration        1/       1" in done.stdout
    held = merged(interrupted / "first", "weights", inputs.student)
    weights = merged(tmp_path, "weights", inputs.student)
    assert all(torch.equal(weights[name], tensor) for name, tensor in held.items())


def test_damaged_samples_are_masked_and_counted(inputs, tmp_path):
    shutil.copytree(inputs.data, tmp_path / "data")
    shard = min((tmp_path / "data").glob("*.tar"))
    index = decode_index(shard.with_suffix(".index.parquet").read_bytes())
    damaged = bytearray(shard.read_bytes())
    damaged[int(index.payload_offset[0])] ^= 1
    shard.write_bytes(damaged)
    stream = StreamConfig(
        Reading(str(tmp_path / "data")),
        seq_length=SEQ_LENGTH,
        seed=SEED,
        global_batch_size=GLOBAL_BATCH,
        on_damage="quarantine",
    )
    rows = AlignedRows(stream).__getitems__(list(range(8 * GLOBAL_BATCH)))
    lost = int(rows["num_quarantined_tokens"].sum())
    assert lost > 0
    options = {"vocag_data": tmp_path / "data", **ALONE, "train_iters": 8}
    done = train(inputs, 1, vocag_on_damage="quarantine", **options)
    counts = re.findall(r"vocag/quarantined_tokens: (\S+)", done.stdout)
    assert len(counts) == 8
    assert sum(map(float, counts)) == pytest.approx(lost)


def test_a_changed_run_is_refused(inputs, interrupted, tmp_path):
    save_model(tmp_path / "other", "llama_scaled", vocab_size=480, seed=9)
    changes = {"train_iters": 6, "vocag_teacher": tmp_path / "other"}
    done = train(inputs, 1, check=False, load=interrupted / "checkpoint", **changes)
    assert done.returncode
    assert "was made with teacher" in done.stderr


def test_a_refusal_ends_both_worlds(inputs, tmp_path):
    save_model(tmp_path, "llama_scaled", vocab_size=300)
    for changes, message in (
        ({"calculate_per_token_loss": None}, "--calculate-per-token-loss is missing"),
        ({"vocag_student": tmp_path}, f"{tmp_path} has rows for 300 tokens"),
        ({"seq_length": 256, "max_position_embeddings": 256}, "was made for 128: lower --seq-len"),
    ):
        done = train(inputs, 2, check=False, **changes, **TWO_WORLDS)
        assert done.returncode
        assert message in done.stderr


def test_a_student_that_ends_before_its_data_lets_the_teacher_go(inputs, tmp_path):
    """Megatron leaves with status 0; the teacher's world waited half an hour to be connected."""
    (tmp_path / "empty").mkdir()
    missing = {"load": tmp_path / "empty", "exit_on_missing_checkpoint": ""}
    # The teacher's ranks read what only Megatron's checks of the student's make of it.
    length = {"seq_length": None, "encoder_seq_length": SEQ_LENGTH}
    start = time.monotonic()
    train(inputs, 2, **missing, **length, **TWO_WORLDS)
    assert time.monotonic() - start < START_TIMEOUT.total_seconds() / 2


def test_a_teacher_without_a_gpu_is_told(monkeypatch):
    """It divided by the number of GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    args = Namespace(exit_signal_handler=False)
    with pytest.raises(ValueError, match=r"Megatron needs CUDA, and torch .* sees no GPU here"):
        serve(Namespace(teacher=None), Namespace(bridge_store=0), None, args)


def test_a_teacher_outlives_the_signal_that_saves(monkeypatch):
    """torchrun passes any signal on to all ranks, and --exit-signal names the student's."""

    class StartedError(Exception):
        pass

    def start(*_):
        raise StartedError

    monkeypatch.setattr("megatron_plugin.teacher.world._start_ranks", start)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        args = Namespace(exit_signal_handler=True, exit_signal=signal.SIGUSR1)
        with pytest.raises(StartedError):
            serve(Namespace(teacher=None), Namespace(bridge_store=0), None, args)
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_killed_world_ends_the_job_and_its_readers(inputs):
    with started(inputs, 2, num_workers=2, **TWO_WORLDS) as job:
        os.kill(job.ranks()[1], signal.SIGKILL)
        output = job.finish()
    assert "Signal 9 (SIGKILL)" in output.rstrip()[-1500:]
    assert "rank      : 1 " in output


def test_a_cut_bridge_ends_the_job(inputs):
    cut = {"VOCAG_TEST_CUT_BRIDGE": "6"}
    done = train(inputs, 2, environment=cut, train_iters=100, check=False, **TWO_WORLDS)
    assert done.returncode
    assert "lost the bridge to the teacher" in done.stderr
    assert "doesn't answer over the bridge" in done.stderr


@pytest.mark.parametrize("teacher", [TWO_WORLDS, ALONE])
def test_sigterm_to_torchrun_saves_and_leaves_nothing(inputs, tmp_path, teacher):
    """Readers belong to a rank's process group no longer, to which torchrun passes the signal."""
    saving = {"exit_signal_handler": "", "save": tmp_path, "save_interval": 100000}
    with started(inputs, 2, num_workers=2, **saving, **teacher) as job:
        job.process.send_signal(signal.SIGTERM)
        output = job.finish(code=1)  # torchrun's own, of any signal
    last = max(map(int, re.findall(r" iteration +(\d+)/", output)))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert "Error: DataLoader" not in output
    longer = {"train_iters": last + 1, "override_opt_param_scheduler": ""}
    again = train(inputs, 2, load=tmp_path, num_workers=2, **longer, **teacher)
    assert f"iteration {last + 1:8}/" in again.stdout
    assert f"iteration {last:8}/" not in again.stdout


class started:  # noqa: N801  a context manager, used like a function
    """A job under torchrun that goes on for ever, after its first steps."""

    def __init__(self, inputs, num_ranks, **changes):
        self.num_ranks = num_ranks
        self.token = f"{time.monotonic_ns()}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = arguments(inputs, train_iters=100000, **changes)
        self.process = subprocess.Popen(
            [*torchrun, "--nproc-per-node", str(num_ranks), "-m", TRAINER, *command],
            cwd=ROOT,
            env=job_environment(VOCAG_TEST_JOB=self.token, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="300"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seen = []

    def __enter__(self):
        for line in self.process.stdout:
            self.seen.append(line)
            if " iteration        2/" in line:
                return self
        raise AssertionError("".join(self.seen[-40:]))

    def __exit__(self, *_):
        self.process.kill()
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.stdout.close()

    def members(self):
        """Return the environments of the job's processes besides torchrun, by their ids."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environment = process.environ()
                if environment.get("VOCAG_TEST_JOB") == self.token:
                    found[process.pid] = environment
        return {pid: own for pid, own in found.items() if pid != self.process.pid}

    def ranks(self):
        """Return the processes of both worlds, by their rank in the job."""
        # The first process of each, whose readers come after it.
        members = sorted(self.members().items(), reverse=True)
        by_rank = {int(own["RANK"]): pid for pid, own in members if "RANK" in own}
        assert sorted(by_rank) == list(range(self.num_ranks))
        return [by_rank[rank] for rank in range(self.num_ranks)]

    def finish(self, code=None):
        """Wait for the end; return all output. No process may be left, which would hold it open."""
        output, _ = self.process.communicate(timeout=ENDS_WITHIN_SECONDS)
        output = "".join(self.seen) + output
        expected = self.process.returncode == code if code is not None else self.process.returncode
        assert expected, output[-4000:]
        assert not self.members()
        return output
