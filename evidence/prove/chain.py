"""An experiment as tasks of doit: what is done stays, what was stopped goes on where it was."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prove.experiment import Arm, Experiment, Stage
from prove.kept import Kept, drop_weights, search_rate
from prove.student import END, train_tokenizer
from prove.tasks import Task, once, task
from prove.texts import Document, healing_texts, read_texts, write_texts
from vocag import AlignedRows, Reading, StreamConfig

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Chain:
    """An experiment, its folders and its tasks.

    Attributes:
        experiment: what is done.
        data: folder of GSM8K, MATH and the other sets.
        output: folder of what experiments share: teacher, student, healing; `own` lies in it.
        published: folder of published records, which are taken over and added to; None: there is
            none.
    """

    experiment: Experiment
    data: Path
    output: Path
    published: Path | None = None

    @property
    def own(self) -> Path:
        """Folder of what this experiment alone makes."""
        return self.output / f"{self.experiment.name}-{self.experiment.scale}"

    @property
    def kept(self) -> Kept:
        """The records and rates."""
        return Kept(self.own, self.published)

    @property
    def source(self) -> Path:
        """Folder of SmolLM2-135M: the teacher, and what the student is cut from."""
        return self.output / "smollm2"

    @property
    def teacher(self) -> str | Path:
        """The model that teaches."""
        return self.experiment.teacher or self.source

    @property
    def student(self) -> Path:
        """Folder of the student before it is healed, or of SmolLM2, as it is or transplanted."""
        if self.experiment.other_teacher:
            return self.source
        return (self.own if self.experiment.tokenizer else self.output) / "student"

    @property
    def healed(self) -> Path:
        """Folder of the run that heals the student."""
        return self.output / "healed"

    @property
    def start(self) -> Path:
        """Folder of the model that all arms begin with."""
        base = self.experiment.base
        if self.experiment.tokenizer or self.experiment.other_teacher:
            return self.student
        ended = base.heal_until == base.heal_steps
        return self.healed / ("model" if ended else f"step-{base.heal_until:06d}")

    def tasks(self) -> Iterator[Task]:
        """Yield every task, in the order in which they are wanted."""
        experiment, text = self.experiment, self.own / "text" / "bytes.json"
        yield from self._make_student(text)
        texts = [text, *(text.with_name(f"{name}.jsonl") for name in experiment.aligned)]
        yield task("text", texts, self._write_texts, [self.output / "text" / "bytes.json"])
        ready = [self.start / "config.json"]
        for name in experiment.aligned:
            ready.append(self.own / name / "manifest.json")
            needed = [text, self.student / "config.json"]
            yield task(f"align:{name}", ready[-1:], (self._align, self.own, name), needed)
        for name, options in experiment.scored.items():
            ready.append(self.own / f"scored-{name}")
            needed = [self.own / name / "manifest.json"]
            yield task(f"score:{name}", ready[-1:], (self._score, name, options), needed)
        references = [self.kept.record(name, 0) for name in self._references]
        yield task("references", references, self._measure_references, ready)
        ready, records = [*ready, *references], [*references]
        for arm, seed in self.runs():
            declared = (arm, experiment.units, experiment.unit)
            if arm.rate is None and seed == self._seeds(arm)[0]:
                found, search = [self.kept.rate(arm.name)], (self._search_rate, arm)
                yield task(f"rate:{arm.name}", found, search, ready, declared)
            records.append(self.kept.record(arm.name, seed))
            rate = [] if isinstance(arm.rate, float) else [self.kept.rate(arm.rate or arm.name)]
            needed, run = [*ready, *rate], (self.run, arm, seed)
            yield task(f"run:{arm.name}:{seed}", records[-1:], run, needed, declared)
        yield task("table", [self.own / "table.md"], self._make_table, records)

    def runs(self) -> list[tuple[Arm, int]]:
        """Return every run, in the order in which they are wanted."""
        arms = self.experiment.arms
        found = [(arm, seed) for arm in arms for seed in self._seeds(arm)]
        return sorted(found, key=lambda run: (run[0].order, run[1], arms.index(run[0])))

    def _seeds(self, arm: Arm) -> tuple[int, ...]:
        return self.experiment.seeds if arm.seeds is None else arm.seeds

    def _make_student(self, text: Path) -> Iterator[Task]:
        """Yield what all experiments share; once made, it is not made again."""
        config, healing = self.student / "config.json", self.output / "text" / "bytes.json"
        yield once("source", [self.source / "config.json"], self._write_source)
        yield once("heal-text", [healing], self._write_healing_text)
        if self.experiment.tokenizer is not None:
            needed = [text, self.source / "config.json"]
            yield task("student", [config], self._make_transplant, needed)
        if self.experiment.tokenizer is not None or self.experiment.other_teacher:
            return
        yield once("student", [config], self._cut_student, ["source", "heal-text"])
        manifest = self.output / "heal" / "manifest.json"
        yield once("align-heal", [manifest], (self._align, self.output, "heal"), ["student"])
        yield once("heal", [self.start / "config.json"], self._heal, ["align-heal"])

    # What the tasks do.

    def call(self, name: str, words: Sequence[object]) -> None:
        """Run a Python command with one thread on a CPU; its log is `logs/NAME.log`.

        Raises:
            RuntimeError: it failed; names the command and its log.
        """
        log = self.own / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        line = [sys.executable, *map(str, words)]
        settings = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        # One thread adds in the same order everywhere, and runs don't disturb each other.
        settings |= {"OMP_NUM_THREADS": "1"} if self.experiment.base.device == "cpu" else {}
        with log.open("a", encoding="utf-8") as file:
            print(shlex.join(line), file=file, flush=True)
            files: dict[str, Any] = {"stdout": file, "stderr": file}
            # The command inherits the folder's lock, and holds it as long as it runs.
            begun = subprocess.Popen(line, env=os.environ | settings, close_fds=False, **files)
            _, status, used = os.wait4(begun.pid, 0)
        begun.returncode = os.waitstatus_to_exitcode(status)
        if begun.returncode:
            raise RuntimeError(f"{shlex.join(line)}\nended with {begun.returncode}: see {log}")
        self.kept.add_cost(name, used.ru_utime + used.ru_stime)

    def vocag(self, name: str, *words: object) -> None:
        """Run a vocag command."""
        self.call(name, ["-m", "vocag", *words])

    def _write_source(self) -> None:
        self.call(
            "source", [HERE.parents[1] / "examples" / "packaged_model.py", "--output", self.source]
        )

    def _healing_texts(self) -> list[Document]:
        base = self.experiment.base
        return healing_texts(base.packages)[: base.num_general]

    def _write_healing_text(self) -> None:
        write_texts({"heal": self._healing_texts()}, self.output / "text")

    def _write_texts(self) -> None:
        write_texts(self.experiment.build(self.data, self._healing_texts()), self.own / "text")

    def _cut_student(self) -> None:
        base, text = self.experiment.base, self.output / "text" / "heal.jsonl"
        tokenizer = self.output / "tokenizer"
        train_tokenizer(list(read_texts(text).values()), base.vocab_size, tokenizer)
        self._transfer(tokenizer, text, "--layers", *base.layers)

    def _make_transplant(self) -> None:
        text, sizes = self.own / "text" / "train.jsonl", self.experiment.new_model
        if not sizes:
            self._transfer(self.experiment.tokenizer, text)
            return
        # Of the transplant only its tokenizer is used.
        cut = self.own / "transplant"
        self._transfer(self.experiment.tokenizer, text, "--layers", 0, output=cut)
        words = ["--like", cut, *sizes, "--output", self.student]
        self.call("student", [HERE / "new_model.py", *words])

    def _transfer(
        self, tokenizer: Path | None, text: Path, *options: object, output: Path | None = None
    ) -> None:
        self.vocag(
            *("student", "transfer", self.source, "--tokenizer", tokenizer, "--text", text),
            *(*options, "--output", output or self.student),
        )

    def _heal(self) -> None:
        base = self.experiment.base
        self.vocag(
            *("heal", "train", "--data", self.output / "heal", "--student", self.student),
            *("--output", self.healed, "--method", "full", "--num-epochs", 4),
            *("--num-steps", base.heal_steps, "--exit-after", base.heal_until),
            *("--export-every", base.heal_until, "--warmup-steps", max(1, base.heal_steps // 50)),
            *("--learning-rate", base.heal_rate, *self._sizes),
        )

    def _align(self, folder: Path, name: str) -> None:
        metadata = self.experiment.metadata
        # A vocabulary from elsewhere has a convention of its own.
        around = () if self.experiment.tokenizer else ("--student-bos", END, "--student-eos", END)
        self.vocag(
            *(f"align-{name}", "align", "--input", folder / "text" / f"{name}.jsonl"),
            # Scoring resumes at the shard that it was at.
            *("--output", folder / name, "--name", name, "--shard-bytes", "2MiB"),
            *("--student", self.student, *around),
            *("--teacher", self.teacher, "--teacher-context", END),
            *(("--metadata", *metadata) if metadata and folder == self.own else ()),
        )

    def _score(self, name: str, options: Sequence[object]) -> None:
        base = self.experiment.base
        self.vocag(
            *(f"score-{name}", "score", self.own / name, "--teacher", self.teacher),
            *("--seq-length", base.seq_length, "--dtype", base.dtype, "--device", base.device),
            *(*options, *(("--threads", 1) if base.device == "cpu" else ())),
        )
        (self.own / f"scored-{name}").touch()

    @property
    def _computes(self) -> list[object]:
        base = self.experiment.base
        half = ["--bf16"] if base.dtype == "bfloat16" else []
        return ["--seq-length", base.seq_length, "--device", base.device, *half]

    @property
    def _sizes(self) -> list[object]:
        base = self.experiment.base
        size, every = base.batch_size, base.checkpoint_every
        batches = ["--global-batch-size", size, "--micro-batch-size", size]
        return [*self._computes, *batches, "--checkpoint-every", every]

    # Runs.

    @cached_property
    def unit(self) -> int:
        """Steps between two measurements."""
        if self.experiment.unit is not None:
            return self.experiment.unit
        base = self.experiment.base
        config = StreamConfig(Reading(str(self.own / "train")), seq_length=base.seq_length)
        return len(AlignedRows(config)) // base.batch_size

    def folder(self, arm: Arm, rate: float, seed: int) -> Path:
        """Return the folder of a run."""
        return self.own / "runs" / arm.name / f"{rate:g}" / f"seed-{seed}"

    def _search_rate(self, arm: Arm) -> None:
        """Double and halve the first rate while that is better; write down what was tried.

        A search is the beginning of the first seed's run: the best rate's goes on from there.
        """
        seed, units = self._seeds(arm)[0], self.experiment.search_units
        place = self.kept.rate(arm.name)
        known = (self.kept.take(place) or {"searched": {}})["searched"]

        def tried(rate: float) -> float:
            if f"{rate:g}" not in known:
                self.train(arm, rate, seed, units)
                known[f"{rate:g}"] = min(self.development(arm, rate, seed)[:units])
                self.kept.write(place, {"searched": known})
            return float(known[f"{rate:g}"])

        found = search_rate(tried, self.experiment.first_rate)
        best = min(found, key=found.__getitem__)
        for rate in found.keys() - {best}:
            drop_weights(self.folder(arm, rate, seed))
        searched = {f"{rate:g}": bits for rate, bits in sorted(found.items())}
        self.kept.write(place, {"searched": searched, "best": best})

    def train(self, arm: Arm, rate: float, seed: int, units: int) -> None:
        """Train a run up to a number of units of its schedule."""
        folder, length = self.folder(arm, rate, seed), arm.units or self.experiment.units
        warmup = self.experiment.warmup_steps or max(1, self.unit // 2)
        start: list[object] = ["-m", "vocag", "train"]
        if arm.program:
            start = [HERE / str(arm.program[0]), *arm.program[1:]]
        teacher = ["--stored-losses", self.teacher] if arm.scored else []
        teacher += ["--teacher", self.teacher] if arm.running else []
        where = ["--where", arm.where(self.own)] if arm.where else []
        words: list[object] = [
            *(*start, "--data", self.own / arm.data, *where, "--student", self.start, *teacher),
            *("--output", folder, "--seed", seed, "--learning-rate", rate, *arm.options),
            *("--num-steps", length * self.unit, "--warmup-steps", warmup),
            *("--exit-after", units * self.unit, "--export-every", self.unit),
            *("--evaluate-every", self.unit, "--heldout", f"dev={self.own / 'dev'}"),
            *("--num-epochs", 4 * length, *self._sizes),
        ]
        self.call(str(folder.relative_to(self.own)), words)

    def development(self, arm: Arm, rate: float, seed: int) -> list[float]:
        """Return a run's bits per byte of the development set, unit by unit."""
        log = (self.folder(arm, rate, seed) / "log.jsonl").read_text("utf-8")
        steps = map(json.loads, log.splitlines())
        return [step["heldout_bits_per_byte"] for step in steps if "heldout_bits_per_byte" in step]

    def run(self, arm: Arm, seed: int) -> None:
        """Train a run to its end, measure it, write its record and drop its weights."""
        if self.kept.take(self.kept.record(arm.name, seed)) is not None:
            return
        rate, units = arm.rate, arm.units or self.experiment.units
        if not isinstance(rate, float):
            rate = float(json.loads(self.kept.rate(rate or arm.name).read_text("utf-8"))["best"])
        folder = self.folder(arm, rate, seed)
        self.train(arm, rate, seed, units)
        bits = self.development(arm, rate, seed)
        best = min(range(units), key=bits.__getitem__) + 1
        wanted = {*(self.experiment.measured or (best,)), units}
        models = {str(unit): folder / f"step-{unit * self.unit:06d}" for unit in sorted(wanted)}
        # The last step's weights are the run's model.
        models[str(units)] = folder / "model"
        for stage in self.experiment.stages:
            if not stage.arms or arm.name in stage.arms:
                models[stage.name] = self._train_stage(stage, folder, rate, seed)
        record = {
            **{"arm": arm.name, "seed": seed, "rate": rate, "unit_steps": self.unit},
            **{"units": units, "development": bits, "best": best},
            "measured": self.measure(folder / "measures.json", models),
        }
        self.kept.write(self.kept.record(arm.name, seed), record)
        drop_weights(folder)

    def _train_stage(self, stage: Stage, folder: Path, rate: float, seed: int) -> Path:
        output = folder / stage.name
        self.vocag(
            str(output.relative_to(self.own)),
            *("train", "--data", self.own / stage.data, "--student", folder / "model"),
            *("--output", output, "--method", "full", "--seed", seed, "--num-steps", stage.steps),
            *("--learning-rate", rate / 4, "--warmup-steps", stage.steps // 10),
            *("--num-epochs", 4, *self._sizes),
        )
        return output / "model"

    def measure(
        self, output: Path, models: Mapping[str, Path], more: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Measure models on every held-out set, and on more texts; return sums by document."""
        sets = {p.stem.removeprefix("held_"): p for p in (self.own / "text").glob("held_*.jsonl")}
        sets |= {name: self.own / "text" / f"{name}.jsonl" for name in more}
        prompts = {name: self.own / "text" / f"{name}.jsonl" for name in self.experiment.prompts}
        words = [
            *(HERE / "measure.py", *(f"{name}={path}" for name, path in sorted(sets.items()))),
            *("--students", *(f"{name}={path}" for name, path in models.items())),
            *("--output", output, *self._computes),
            *(["--numbers"] if self.experiment.numbers else []),
            *(["--prompts", *(f"{n}={p}" for n, p in prompts.items())] if prompts else []),
        ]
        self.call(str(output.relative_to(self.own).with_suffix("")), words)
        measured: dict[str, Any] = json.loads(output.read_text("utf-8"))
        return measured

    @property
    def _references(self) -> dict[str, Path]:
        """What no arm trains: the model that all begin with, and its teacher."""
        return {"original": Path(self.teacher), "start": self.start}

    def _measure_references(self) -> None:
        """Write records of the models that no arm trains."""
        places = [self.kept.record(name, 0) for name in self._references]
        if all(self.kept.take(place) is not None for place in places):
            return
        output, more = self.own / "references.json", self.experiment.start_measured
        for name, found in self.measure(output, self._references, more).items():
            record = {"arm": name, "seed": 0, "units": 0, "best": 0, "measured": {"0": found}}
            self.kept.write(self.kept.record(name, 0), record)

    def _make_table(self) -> None:
        (self.own / "table.md").write_text(self.experiment.judge(self.own / "records"), "utf-8")
