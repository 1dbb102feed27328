"""The parts of benchmarks/gpu.py, each in a process of its own."""

import importlib.metadata
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from gpu_megatron import train_megatron
from gpu_results import note, run_and_print
from gpu_world import SMALL, Scale, make_dataset, make_model, model_shape
from tokenizers import Tokenizer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
WARM_STEPS = 2
GIB = 2**30
LIBRARIES = ("torch", "transformers", "numpy")
PARITY = ROOT / "tests/pipeline/training/test_on_gpu.py"


@dataclass(frozen=True)
class Bench:
    """A folder, a device, and whether everything is small; each method is a part."""

    work: Path
    device: str
    small: bool

    @property
    def scale(self) -> Scale:
        """How large everything is."""
        return SMALL if self.small else Scale()

    def matmul(self) -> None:
        """Note the machine, its versions, and the rate of large bf16 products."""
        from pipeline.command_line.installed import installed_version
        from pipeline.training.prediction import measure_matmul

        is_gpu = self.device == "cuda"
        name = torch.cuda.get_device_name() if is_gpu else "CPU"
        versions = [f"{each} {importlib.metadata.version(each)}" for each in LIBRARIES]
        versions += [f"vocag {installed_version()}"]
        machine = ", ".join([name, *versions, time.strftime("%Y-%m-%d")])
        rate = measure_matmul(torch.device(self.device), torch.bfloat16, self.scale.matmul)
        note(self.work, "matmul", machine=machine, tflops=float(f"{rate / 1e12:.3g}"))

    def data(self) -> None:
        """Make texts, tokenizers, the dataset and the student."""
        make_dataset(self.work, self.scale)
        files = {side: str(self.work / f"{side}.json") for side in ("student", "teacher")}
        sizes = {side: Tokenizer.from_file(file).get_vocab_size() for side, file in files.items()}
        note(self.work, "data", vocabulary=sizes)
        make_model(self.work, "student", self.scale, self.device)

    def tests(self) -> None:
        """Run the tests of kernels that are marked gpu, or their stand-ins."""
        self._pytest("tests", *(path for path in gpu_tests() if path != PARITY))

    def parity(self) -> None:
        """Compare steps, scores, draws and resumed runs with those of the CPU."""
        self._pytest("parity", PARITY)

    def plain(self) -> None:
        """Time what a user would write instead."""
        self._plain("plain", lambda model: model)

    def plain_compiled(self) -> None:
        """Time the same, compiled."""
        self._plain("plain_compiled", lambda model: cast(Any, torch.compile(model)))

    def stored(self) -> None:
        """Let a teacher of two layers score the dataset, for the methods that follow."""
        from beam_jobs.score.command import main

        teacher = make_model(self.work, "tiny", self.scale, self.device)
        given = ["--seq-length", str(self.scale.seq_length), "--allow-untrained-teacher"]
        given += ["--top-k", "8", "--draws", "4", "--device", self.device]
        started = time.perf_counter()
        status = main([str(self.work / "aligned"), "--teacher", str(teacher), *given])
        note(self.work, "stored", whole_seconds=round(time.perf_counter() - started, 1))
        if status:
            sys.exit(status)

    def full(self) -> None:
        """Time `vocag train --method full`, next to the memory that is predicted."""
        self._train("full", "--method", "full")

    def full_compiled(self) -> None:
        """Time the same, compiled."""
        self._train("full_compiled", "--method", "full", "--compile")

    def teacher(self) -> None:
        """Time the paper's selection."""
        self._train("teacher", "--method", "teacher", *self._stored)

    def distill(self) -> None:
        """Time distillation by 8 entries and 4 draws."""
        self._train("distill", "--method", "distill", *self._stored)

    def alm(self) -> None:
        """Time likelihood matching."""
        self._train("alm", "--method", "alm", *self._stored)

    def running(self) -> None:
        """Time a teacher of 7 B that runs with the student."""
        teacher = make_model(self.work, "seven", self.scale, self.device)
        self._train("running", "--method", "teacher", "--teacher", str(teacher))

    def score(self) -> None:
        """Time scoring, without and with likeliest tokens and draws, and the bare forward pass."""
        from measure import measure
        from scoring import bare_pass, ready_teacher

        from beam_jobs.score.steps import score_shard
        from pipeline.scoring.engines.engine_settings import TopSettings, TransformersSettings

        teacher = make_model(self.work, "seven", self.scale, self.device)
        sizes = {"seq_length": self.scale.seq_length, "dtype": "bfloat16"}
        sizes |= {"here": TransformersSettings(self.device), "allow_untrained_teacher": True}
        tops = {"losses": TopSettings(), "top8_draws4": TopSettings(8, draws=4)}
        ready = {
            name: ready_teacher(self.work / "aligned", str(teacher), top=top, **sizes)
            for name, top in tops.items()
        }

        def scoring(name: str) -> Callable[[], object]:
            fingerprint = ready[name].job.rule.fingerprint[:16]  # as names of files have it
            for file in (self.work / "aligned").glob(f"*teacher-{fingerprint}*"):
                file.unlink()
            return lambda: score_shard(0, ready[name])

        contenders = {"bare": lambda: bare_pass(ready["losses"])}
        contenders |= {name: lambda name=name: scoring(name) for name in ready}  # type: ignore[misc]
        times = measure(contenders, 2)  # the first compiles kernels
        tokens = int(ready["losses"].shard(0).read_tokens().input_ids.size)
        speeds = {name: round(tokens / min(times.wall[name])) for name in contenders}
        shares = {name: round(speeds[name] / speeds["bare"], 3) for name in ready}
        note(self.work, "score", tokens=tokens, tokens_a_second=speeds, of_bare=shares)

    def profile(self) -> None:
        """Note where a step's time goes: the ten operations that take most."""
        from pipeline.training import loop

        original, activities = loop.train_step, [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.device == "cuda" else []

        def profiled(run: Any, loader: Any, step: int) -> dict[str, float]:
            if step != WARM_STEPS:
                return original(run, loader, step)
            with profile(activities=activities) as seen:
                found = original(run, loader, step)
            own = "self_device_time_total" if self.device == "cuda" else "self_cpu_time_total"
            # Operations alone: each one's kernels are listed again, by their own names.
            events = [each for each in seen.key_averages() if each.device_type == DeviceType.CPU]
            events.sort(key=lambda each: -getattr(each, own))
            total = sum(getattr(each, own) for each in events) or 1
            top = {each.key[:70]: round(getattr(each, own) / total, 3) for each in events[:10]}
            note(self.work, "profile", shares=top)
            return found

        loop.train_step = profiled
        self._run("profile", "--method", "full")  # not timed: profiling takes longer than the step

    def megatron_plain(self) -> None:
        """Time the student alone in Megatron."""
        train_megatron(self.work, self.scale, self.device, "megatron_plain")

    def megatron_colocated(self) -> None:
        """Time a teacher of 7 B on the student's rank."""
        make_model(self.work, "seven", self.scale, self.device)
        train_megatron(self.work, self.scale, self.device, "megatron_colocated")

    def megatron_two_worlds(self) -> None:
        """Time a teacher of two layers in a world of its own, on the same GPU."""
        make_model(self.work, "tiny", self.scale, self.device)
        train_megatron(self.work, self.scale, self.device, "megatron_two_worlds")

    @property
    def _stored(self) -> tuple[str, ...]:
        return "--stored-losses", str(self.work / "tiny")

    def _pytest(self, part: str, *paths: Path) -> None:
        """Run the tests that are marked gpu, or those of the stand-in: the fixture names both."""
        own = "cuda" if self.device == "cuda" else "stand-in"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", own]
        # A file that needs a package which isn't there costs itself.
        command += ["--continue-on-collection-errors", *map(str, paths)]
        status, told = run_and_print(command, cwd=ROOT)
        note(self.work, part, tests=(told.strip().splitlines() or ["none"])[-1].strip("= "))
        if status:
            sys.exit(status)

    def _train(self, name: str, *more: str) -> None:
        """Note what the steps of `vocag train` took."""
        output = self._run(name, *more)
        log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
        seconds = statistics.median(line["seconds"] for line in log[WARM_STEPS:])
        losses = [round(line["loss"], 4) for line in log]
        self._note_steps(name, seconds, losses=losses)
        note(self.work, name, predicted=self._predicted(output, *more))

    def _run(self, name: str, *more: str) -> Path:
        """Run `vocag train` for some steps, with nothing that it keeps; return its folder."""
        from pipeline.training import loop
        from pipeline.training.command import main

        _accept_untrained_teachers()
        loop._keep_checkpoint = lambda *_, **__: True
        loop._keep_model = lambda *_, **__: None
        scale, output = self.scale, self.work / "runs" / name
        sizes = {
            "seq-length": scale.seq_length,
            "micro-batch-size": scale.micro_batch_size,
            "global-batch-size": scale.global_batch_size,
            "num-steps": scale.steps + 1,
            "exit-after": scale.steps,
            "warmup-steps": 1,
            "num-epochs": 20,
            "device": self.device,
        }
        argv = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
        paths = ["--data", str(self.work / "aligned"), "--student", str(self.work / "student")]
        status = main([*paths, "--output", str(output), "--bf16", *argv, *more])
        if status:
            sys.exit(status)
        return output

    def _predicted(self, output: Path, *more: str) -> float:
        """Return the GiB that a dry run would have named."""
        from pipeline.training.command import parse_config
        from pipeline.training.prediction import count_memory

        scale = self.scale
        argv = ["--data", str(self.work / "aligned"), "--student", "s", "--output", str(output)]
        argv += ["--seq-length", str(scale.seq_length), "--bf16", *more, "--micro-batch-size"]
        config = parse_config([*argv, str(scale.micro_batch_size)])
        teacher = model_shape("seven", scale) if config.served.by == "running" else None
        found = count_memory(config, model_shape("student", scale), teacher, scale.seq_length)
        return round(found.total / GIB, 1)

    def _plain(self, name: str, wrapped: Callable[[Any], Any]) -> None:
        """Time a loop of transformers: fp32 weights, autocast, fused AdamW."""
        scale, device = self.scale, torch.device(self.device)
        loaded = AutoModelForCausalLM.from_pretrained(
            self.work / "student",
            dtype=torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=False,
        )
        model = cast(Any, loaded).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        run, size = wrapped(model), (scale.micro_batch_size, scale.seq_length)
        pieces, times = scale.global_batch_size // scale.micro_batch_size, []
        for _ in range(scale.steps):
            started = time.perf_counter()
            for _ in range(pieces):
                ids = torch.randint(0, scale.student_tokens, size, device=device)
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = run(input_ids=ids, labels=ids, use_cache=False).loss
                (loss / pieces).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            norm.item()
            times.append(time.perf_counter() - started)
        self._note_steps(name, statistics.median(times[WARM_STEPS:]))

    def _note_steps(self, name: str, seconds: float, **more: Any) -> None:
        tokens = self.scale.global_batch_size * self.scale.seq_length
        peak = torch.cuda.max_memory_allocated() / GIB if self.device == "cuda" else 0.0
        speed = {"step": round(seconds, 4), "tokens_s": round(tokens / seconds)}
        note(self.work, name, **speed, peak=round(peak, 1), **more)


def gpu_tests() -> list[Path]:
    """Return the files whose tests ask for the fixture `gpu`; others need packages of their own."""
    asks = re.compile(r"def test_\w+\([^)]*\bgpu\b")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in files if asks.search(path.read_text("utf-8"))]


def _accept_untrained_teachers() -> None:
    """Let random weights teach: what is measured is their speed."""
    from pipeline.models import running_teacher

    cast(Any, running_teacher).require_trained = lambda *_, **__: None
