"""Does a teacher with another vocabulary help a student that knows its language? The whole chain.

    python examples/prove/recipe.py --data benchmarks --output prove

Every step is a command, is skipped where it is done, and goes on where it stopped.
docs/evidence.md says what is compared, and what will count as an answer.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))

from prove.arms import SCALES, SEARCHED, SELECTORS, Arm, Scale, arms_of
from prove.commands import Chain, Command, only_one, perform
from prove.compute import equal_steps, read_weights, scoring_cost, training_cost

EXAMPLES = Path(__file__).parents[1]
HERE = Path(__file__).parent
END = "<|endoftext|>"
ALIGNED = ("heal", "gate", "dev", "last", "noisy", "clean")
HELD_OUT = ("gsm8k", "math", "docstrings", "noise")
ASKED = ("gsm8k", "math")
KEEP_FRACTION = 0.4
"""Of the arm whose arithmetic others equal."""
GATE_FAILED = 3
NUM_GATE_ROWS = 200
# Costs of what is no training, in steps: measured roughly, for the progress alone.
_TEXTS, _ALIGN, _SCORE, _KEPT, _MEASURE, _ASK = 15, 6, 350, 10, 25, 15


@dataclass(frozen=True)
class Experiment:
    """Where an experiment lies, and how large it is.

    Attributes:
        data: folder of GSM8K and MATH.
        output: folder of everything that is made.
        scale: sizes.
        jobs: runs at one time, on a CPU a thread each.
        teacher: folder of the teacher; None for SmolLM2-135M, whose layers the student has.
    """

    data: Path
    output: Path
    scale: Scale
    jobs: int
    teacher: Path | None = None

    @property
    def source(self) -> Path:
        """Folder of the model that the student is cut from."""
        return self.output / "smollm2"

    @property
    def scorer(self) -> Path:
        """Folder of the teacher."""
        return self.teacher or self.source

    @property
    def healed(self) -> Path:
        """Folder of the student that all arms start from."""
        return self.output / "healed" / "model"

    def run(self, arm: Arm, seed: int) -> Path:
        """Return the folder of an arm's run."""
        return self.output / "runs" / arm.data / arm.label / f"seed-{seed}"

    def rate_run(self, method: str, rate: float) -> Path:
        """Return the folder of a run that searches a learning rate."""
        return self.output / "rates" / f"{method}-{rate:g}"

    def command(self, folder: Path, arguments: list[object], cost: float) -> Command:
        """Return a command by the name of what it makes."""
        return Command(str(folder.relative_to(self.output)), arguments, cost)


def main() -> int:
    """Run what is missing; return a failed gate's status, else 0."""
    parser = argparse.ArgumentParser(description="Run the whole experiment.")
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K and MATH")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--teacher", type=Path, help="folder (default: SmolLM2-135M, packaged)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a thread each")
    parser.add_argument("--until", choices=("gate", "table"), default="table", help="stop there")
    parser.add_argument("--ignore-gate", action="store_true", help="go on where the gate fails")
    options = parser.parse_args()
    scale = SCALES[options.scale]
    own = Experiment(options.data, options.output, scale, options.jobs, options.teacher)
    return run(own, until=options.until, ignore_gate=options.ignore_gate)


def run(own: Experiment, *, until: str = "table", ignore_gate: bool = False) -> int:
    """Run what is missing, stage by stage, with the progress of the whole."""
    own.output.mkdir(parents=True, exist_ok=True)
    # One thread: sums in the same order on every machine, and runs side by side.
    settings = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    settings |= {"OMP_NUM_THREADS": "1"} if own.scale.device == "cpu" else {}
    bar = tqdm(total=0, initial=round(costs(own)[1]), unit="", mininterval=1)
    with only_one(own.output) as lock, bar:
        for name in stages(own):
            bar.set_description(name)
            bar.total = round(costs(own)[0])
            write_costs(own)
            # Made anew: what earlier stages found stands in the arguments now.
            chains = stages(own)[name]
            perform(own.output, chains, bar, jobs=own.jobs, settings=settings, lock=lock)
            if name == "gate":
                passed = json.loads((own.output / "kept.json").read_text("utf-8"))["passed"]
                if until == "gate" or not (passed or ignore_gate):
                    return 0 if passed else GATE_FAILED
    print((own.output / "table.md").read_text("utf-8"))
    return 0


def costs(own: Experiment) -> tuple[float, float]:
    """Return what all commands cost, and those that are done."""
    whole = [command for chains in stages(own).values() for chain in chains for command in chain]
    done = (command.cost for command in whole if command.record(own.output).exists())
    return sum(command.cost for command in whole), sum(done)


def stages(own: Experiment) -> dict[str, list[Chain]]:
    """Return all commands; what is not known yet, such as a learning rate, is NaN in them."""
    rates = choose_rates(own)
    runs = [(arm, seed) for arm in arms_of(own.scale) for seed in arm.seeds]
    # What the verdicts rest on comes first, the control after what may make it needless.
    runs.sort(
        key=lambda run: (
            not run[0].decides,
            run[0].decides and run[0].data == "clean",
            own.scale.seeds.index(run[1]),
        )
    )
    return {
        "texts": [[write_source(own)], [write_texts(own)]],
        "student": [[make_student(own)]],
        "align": [[align(own, name)] for name in ALIGNED],
        "heal": [[heal(own)], [score(own, "gate", _SCORE / 15)]],
        "gate": [[_kept(own, own.healed, own.output / "kept", NUM_GATE_ROWS)]],
        "score": [[score(own, name, _SCORE)] for name in ("noisy", "clean")],
        "rates": [[command] for command in search_rates(own)],
        "arms": [list(train_and_measure(own, arm, seed, rates)) for arm, seed in runs],
        "table": [[make_table(own)]],
    }


def write_source(own: Experiment) -> Command:
    """Write the folder of the model that the student is cut from."""
    arguments = [EXAMPLES / "packaged_model.py", "--output", own.source]
    return own.command(own.source, arguments, _TEXTS)


def write_texts(own: Experiment) -> Command:
    """Write all texts."""
    scale, folder = own.scale, own.output / "text"
    arguments = [
        *(HERE / "corpus.py", "--data", own.data, "--output", folder),
        *("--num-general", scale.num_general, "--num-documents", scale.num_documents),
        *("--num-trained", scale.num_trained, "--num-held-out", scale.num_held_out),
        *("--num-held-out-general", scale.num_held_out_general, "--packages", *scale.packages),
        *("--held-out-packages", *scale.held_out_packages),
    ]
    return own.command(folder, arguments, _TEXTS)


def make_student(own: Experiment) -> Command:
    """Cut a model's layers, and give them another vocabulary."""
    scale, folder = own.scale, own.output / "student"
    arguments = [
        *(HERE / "student.py", "--text", own.output / "text" / "heal.jsonl"),
        *("--source", own.source, "--vocab-size", scale.vocab_size, "--layers", *scale.layers),
        *("--output", folder),
    ]
    return own.command(folder, arguments, _TEXTS)


def align(own: Experiment, name: str) -> Command:
    """Align a text."""
    folder = own.output / name
    arguments = [
        *("-m", "beam_jobs.align", "--input", own.output / "text" / f"{name}.jsonl"),
        *("--output", folder, "--name", name, "--shard-bytes", own.scale.shard_bytes),
        *("--student", own.output / "student"),
        *("--student-bos", END, "--student-eos", END),
        *("--teacher", own.scorer, "--teacher-context", END),
    ]
    return own.command(folder, arguments, _ALIGN)


def heal(own: Experiment) -> Command:
    """Teach the student general text again, plainly."""
    scale, folder = own.scale, own.output / "healed"
    arguments = [
        *_train(own, "heal", own.output / "student", folder, scale.heal_steps),
        *("--method", "full", "--warmup-steps", scale.heal_warmup_steps),
        *("--learning-rate", scale.heal_rate, "--evaluate-every", scale.checkpoint_every),
    ]
    return _trained(own, folder, arguments, scale.heal_steps)


def score(own: Experiment, name: str, cost: float) -> Command:
    """Store the teacher's losses of a text."""
    dtype = "bfloat16" if half_precision(own) else "float32"
    arguments = [
        *("-m", "beam_jobs.score", own.output / name, "--teacher", own.scorer),
        *("--seq-length", own.scale.seq_length, "--dtype", dtype, *_device(own)),
        *(("--threads", 1) if own.scale.device == "cpu" else ()),
    ]
    return own.command(own.output / f"scored-{name}", arguments, cost)


def search_rates(own: Experiment) -> Iterator[Command]:
    """Train each searched arm for some steps at every rate."""
    for name in SEARCHED:
        for rate in own.scale.rates:
            folder, steps = own.rate_run(name, rate), own.scale.search_steps
            arguments = _train_arm(own, Arm(name, "noisy", (0,)), 0, rate, folder, steps)
            yield _trained(own, folder, arguments, steps)


def choose_rates(own: Experiment) -> dict[str, float]:
    """Write and return the best rate of each searched arm, by the development set; NaN before."""
    if not all(command.record(own.output).exists() for command in search_rates(own)):
        return dict.fromkeys(SEARCHED, math.nan)
    found: dict[str, dict[str, float]] = {}
    for name in SEARCHED:
        found[name] = {}
        for rate in own.scale.rates:
            log = own.rate_run(name, rate) / "log.jsonl"
            last = json.loads(log.read_text("utf-8").splitlines()[-1])
            found[name][f"{rate:g}"] = last["heldout_bits_per_byte"]
    best = {name: float(min(values, key=values.__getitem__)) for name, values in found.items()}
    text = json.dumps({"searched": found, "best": best}, indent=1)
    (own.output / "rates.json").write_text(text + "\n", "utf-8")
    return best


def steps_of(own: Experiment, arm: Arm) -> int:
    """Return an arm's number of steps: everybody's, or what the same arithmetic allows."""
    if not arm.compute or not _has_costs(own):
        return own.scale.steps
    student = read_weights(own.healed)
    cost = training_cost(student, KEEP_FRACTION)
    if arm.compute == "scored":
        cost += scoring_cost(read_weights(own.scorer), own.output / "noisy")
    return equal_steps(own.scale.steps, cost, training_cost(student))


def _has_costs(own: Experiment) -> bool:
    commands = (heal(own), align(own, "noisy"), align(own, "clean"))
    return all(command.record(own.output).exists() for command in commands)


def write_costs(own: Experiment) -> None:
    """Write what every arm's arithmetic comes to, once models and texts are there."""
    if not _has_costs(own):
        return
    student, tokens = read_weights(own.healed), own.scale.batch_size * own.scale.seq_length
    found: dict[str, dict[str, dict[str, float]]] = {}
    for arm in arms_of(own.scale):
        steps = steps_of(own, arm)
        kept = (arm.keep_fraction or 1.0) if arm.method in SELECTORS else 1.0
        scored = scoring_cost(read_weights(own.scorer), own.output / arm.data)
        found.setdefault(arm.data, {})[arm.label] = {
            "seeds": len(arm.seeds),
            "steps": steps,
            "student_operations": steps * tokens * training_cost(student, kept),
            "teacher_operations": steps * tokens * scored if arm.needs_losses else 0.0,
        }
    num_runs = sum(len(arm.seeds) for arm in arms_of(own.scale))
    costs = {"num_runs": num_runs, "tokens_per_step": tokens, "arms": found}
    text = json.dumps(costs, indent=1)
    (own.output / "costs.json").write_text(text + "\n", "utf-8")


def train_and_measure(
    own: Experiment, arm: Arm, seed: int, rates: dict[str, float]
) -> Iterator[Command]:
    """Train one arm of one seed; what was not searched takes the rate of `teacher`.

    The last stage is plain training, as every arm's, on text that none has seen.
    """
    scale, folder = own.scale, own.run(arm, seed)
    rate = rates.get(arm.method, rates["teacher"])
    steps = steps_of(own, arm)
    yield _trained(
        own, folder / "main", _train_arm(own, arm, seed, rate, folder / "main", steps), steps
    )
    arguments = [
        *_train(own, "last", folder / "main" / "model", folder / "last", scale.last_steps),
        *("--method", "full", "--seed", seed, "--warmup-steps", scale.last_steps // 10),
        *("--learning-rate", rates["full"] / 4),
    ]
    yield _trained(own, folder / "last", arguments, scale.last_steps)
    yield measure(own, folder)
    if seed in scale.seeds[: scale.num_questioned]:
        yield ask(own, folder)
        if arm.data == "noisy":
            yield _kept(own, folder / "main" / "model", folder / "kept", scale.num_counted)


def measure(own: Experiment, folder: Path) -> Command:
    """Measure a run before and after its last stage."""
    sets = [f"{name}={own.output / 'text' / f'held_{name}.jsonl'}" for name in HELD_OUT]
    models = ["--students", *(folder / stage / "model" for stage in ("main", "last"))]
    size = ["--seq-length", own.scale.seq_length, *_device(own), *_half(own)]
    return own.command(folder / "measures", [HERE / "measure.py", *sets, *models, *size], _MEASURE)


def ask(own: Experiment, folder: Path) -> Command:
    """Ask a run's last student for solutions."""
    arguments = [
        *("-m", "vocag", "evaluate", f"last={folder / 'last' / 'model'}", "--tasks", *ASKED),
        *("--measures", "solution", "--data", own.data, "--limit", own.scale.num_asked),
        *("--dtype", "float32", *_device(own), "--output", folder / "evaluated"),
    ]
    return own.command(folder / "evaluated", arguments, _ASK)


def make_table(own: Experiment) -> Command:
    """Compare the runs."""
    return own.command(own.output / "table", [HERE / "table.py", own.output], 1)


def _trained(own: Experiment, folder: Path, arguments: list[object], steps: int) -> Command:
    name = str(folder.relative_to(own.output))
    return Command(name, arguments, steps, spare=folder / "checkpoint.pt")


def _train_arm(
    own: Experiment, arm: Arm, seed: int, rate: float, folder: Path, steps: int
) -> list[object]:
    share = [] if arm.keep_fraction is None else ["--keep-fraction", arm.keep_fraction]
    stored = ["--stored-losses", own.scorer] if arm.needs_losses else []
    return [
        *_train(own, arm.data, own.healed, folder, steps),
        *("--method", arm.method, *share, *stored, "--seed", seed),
        *("--warmup-steps", own.scale.warmup_steps, "--learning-rate", rate),
    ]


def _train(own: Experiment, data: str, student: Path, folder: Path, steps: int) -> list[object]:
    scale = own.scale
    return [
        *("-m", "pipeline.training", "--data", own.output / data, "--student", student),
        *("--output", folder, "--heldout", f"dev={own.output / 'dev'}", "--num-steps", steps),
        *("--seq-length", scale.seq_length, "--global-batch-size", scale.batch_size),
        *("--micro-batch-size", scale.batch_size, "--num-epochs", scale.num_epochs),
        *("--checkpoint-every", scale.checkpoint_every, *_device(own), *_half(own)),
    ]


def _kept(own: Experiment, student: Path, result: Path, num_rows: int) -> Command:
    name = str(result.relative_to(own.output))
    arguments = [
        *(HERE / "kept.py", "--data", own.output / "gate", "--teacher", own.scorer),
        *("--student", student, "--seq-length", own.scale.seq_length),
        *("--micro-batch-size", own.scale.batch_size, "--num-rows", num_rows),
        *("--output", f"{result}.json"),
        *(*_device(own), *_half(own)),
    ]
    return Command(name, arguments, _KEPT, accepted=(0, GATE_FAILED))


def _device(own: Experiment) -> list[object]:
    return ["--device", own.scale.device]


def _half(own: Experiment) -> list[object]:
    return ["--bf16"] if half_precision(own) else []


def half_precision(own: Experiment) -> bool:
    """Say whether the processor multiplies in bfloat16; CPUs that don't are slower in it."""
    if own.scale.device == "cuda":
        return True
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "avx512_bf16" in flags.read_text("utf-8")


if __name__ == "__main__":
    sys.exit(main())
