"""Does a teacher with another vocabulary help a student that knows its language? The whole chain.

    python examples/prove/recipe.py --data benchmarks --output prove

Every step is a command, is skipped where its result is there, and goes on where it stopped.
docs/evidence.md says what is compared, and what will count as an answer.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))

from prove.arms import SCALES, SEARCHED, Arm, Scale, arms_of

EXAMPLES = Path(__file__).parents[1]
HERE = Path(__file__).parent
END = "<|endoftext|>"
MATHEMATICS = ("noisy", "clean")
HELD_OUT = ("gsm8k", "math", "docstrings", "noise")


@dataclass(frozen=True)
class Command:
    """A command line and the file that is there once it is done.

    Attributes:
        arguments: after the interpreter.
        result: made last.
        cost: relative to other commands, for the progress.
        accepted: statuses that are no failure.
    """

    arguments: Sequence[object]
    result: Path
    cost: float = 1.0
    accepted: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Experiment:
    """Where an experiment lies, and how large it is.

    Attributes:
        data: folder of GSM8K and MATH.
        output: folder of everything that is made.
        scale: sizes.
        jobs: runs at one time, a thread each.
    """

    data: Path
    output: Path
    scale: Scale
    jobs: int

    @property
    def teacher(self) -> Path:
        """Folder of the teacher."""
        return self.output / "smollm2"

    @property
    def healed(self) -> Path:
        """Folder of the student that all arms start from."""
        return self.output / "healed" / "model"

    def run(self, arm: Arm, seed: int) -> Path:
        """Return the folder of an arm's run."""
        return self.output / "runs" / arm.data / arm.label / f"seed-{seed}"


def main() -> int:
    """Run what is missing; return a failed gate's status, else 0."""
    parser = argparse.ArgumentParser(description="Run the whole experiment.")
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K and MATH")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a thread each")
    parser.add_argument("--until", choices=("gate", "table"), default="table", help="stop there")
    parser.add_argument("--ignore-gate", action="store_true", help="go on where the gate fails")
    options = parser.parse_args()
    own = Experiment(options.data, options.output, SCALES[options.scale], options.jobs)
    passed = run_until_gate(own)
    if options.until == "gate" or not (passed or options.ignore_gate):
        return 0 if passed else 3
    run_arms(own)
    print((own.output / "table.md").read_text("utf-8"))
    return 0


def run_until_gate(own: Experiment) -> bool:
    """Make the student, its text and the teacher's losses; say whether the gate is passed."""
    own.output.mkdir(parents=True, exist_ok=True)
    for stage in (make_texts, make_student, align, heal, score, gate):
        perform(own, stage(own), stage.__name__)
    return bool(json.loads((own.output / "gate.json").read_text("utf-8"))["passed"])


def run_arms(own: Experiment) -> None:
    """Train every arm of every seed, measure and compare them."""
    perform(own, search_rates(own), "search_rates")
    rates = choose_rates(own)
    arms = [(arm, seed) for arm in arms_of(own.scale) for seed in arm.seeds]
    perform(own, [train_main(own, *run, rates) for run in arms], "train_main")
    perform(own, [train_last(own, *run, rates) for run in arms], "train_last")
    perform(own, [command for run in arms for command in measure(own, *run)], "measure")
    perform(own, make_table(own), "make_table")


def make_texts(own: Experiment) -> list[Command]:
    """Write the teacher's folder and all texts."""
    scale, text = own.scale, own.output / "text"
    limits = ["--num-general", scale.num_general, "--num-documents", scale.num_documents]
    packages = ["--packages", *scale.packages, "--held-out-packages", *scale.held_out_packages]
    sizes = [*limits, "--num-held-out", scale.num_held_out, *packages]
    return [
        Command(
            [EXAMPLES / "packaged_model.py", "--output", own.teacher],
            own.teacher / "model.safetensors",
        ),
        Command(
            [HERE / "corpus.py", "--data", own.data, "--output", text, *sizes], text / "bytes.json"
        ),
    ]


def make_student(own: Experiment) -> list[Command]:
    """Cut the teacher's layers, and give them another vocabulary."""
    scale, folder = own.scale, own.output / "student"
    source = ["--text", own.output / "text" / "heal.jsonl", "--teacher", own.teacher]
    shape = ["--vocab-size", scale.vocab_size, "--layers", *scale.layers]
    arguments = [HERE / "student.py", *source, *shape, "--output", folder]
    return [Command(arguments, folder / "model.safetensors")]


def align(own: Experiment) -> list[Command]:
    """Align what is trained on and what learning rates are searched on."""
    student = ["--student", own.output / "student", "--student-bos", END, "--student-eos", END]
    tokenizers = [*student, "--teacher", own.teacher, "--teacher-context", END]
    commands = []
    for name in ("heal", "dev", "last", *MATHEMATICS):
        paths = ["--input", own.output / "text" / f"{name}.jsonl", "--output", own.output / name]
        arguments = ["-m", "beam_jobs.align", *paths, "--name", name, *tokenizers]
        commands.append(Command(arguments, own.output / name / "manifest.json"))
    return commands


def heal(own: Experiment) -> list[Command]:
    """Teach the student general text again, plainly."""
    scale = own.scale
    arguments = [
        *_train(own, "heal", own.output / "student", own.output / "healed"),
        *(
            "--method",
            "full",
            "--num-steps",
            scale.heal_steps,
            "--warmup-steps",
            scale.warmup_steps,
        ),
        *("--learning-rate", scale.heal_rate, "--evaluate-every", scale.evaluate_every),
    ]
    return [Command(arguments, own.healed / "model.safetensors")]


def score(own: Experiment) -> list[Command]:
    """Store the teacher's losses of both mixtures."""
    dtype = "bfloat16" if half_precision() else "float32"
    commands = []
    for name in MATHEMATICS:
        where = [own.output / name, "--teacher", own.teacher, "--seq-length", own.scale.seq_length]
        how = ["--dtype", dtype, "--threads", 1]
        finished = own.output / f"scored-{name}"
        commands.append(Command(["-m", "beam_jobs.score", *where, *how], finished))
    return commands


def gate(own: Experiment) -> list[Command]:
    """Count what the healed student's selectors keep of each kind of text."""
    return [_kept(own, own.healed, own.output / "gate.json")]


def search_rates(own: Experiment) -> list[Command]:
    """Train each searched arm for a quarter of the steps at every rate."""
    commands = []
    for name in SEARCHED:
        arm = Arm(name, "noisy", (0,))
        for rate in own.scale.rates:
            folder = own.output / "rates" / f"{name}-{rate:g}"
            arguments = _train_arm(own, arm, 0, rate, folder, own.scale.steps // 4)
            result = folder / "model" / "model.safetensors"
            commands.append(Command(arguments, result, own.scale.steps / 4))
    return commands


def choose_rates(own: Experiment) -> dict[str, float]:
    """Write and return the best rate of each searched arm, by the development set."""
    found: dict[str, dict[str, float]] = {}
    for name in SEARCHED:
        found[name] = {}
        for rate in own.scale.rates:
            log = own.output / "rates" / f"{name}-{rate:g}" / "log.jsonl"
            last = json.loads(log.read_text("utf-8").splitlines()[-1])
            found[name][f"{rate:g}"] = last["heldout_bits_per_byte"]
    best = {name: float(min(values, key=values.__getitem__)) for name, values in found.items()}
    text = json.dumps({"searched": found, "best": best}, indent=1)
    (own.output / "rates.json").write_text(text + "\n", "utf-8")
    return best


def train_main(own: Experiment, arm: Arm, seed: int, rates: dict[str, float]) -> Command:
    """Train one arm of one seed; what was not searched takes the rate of `teacher`."""
    folder = own.run(arm, seed) / "main"
    rate = rates.get(arm.method, rates["teacher"])
    arguments = _train_arm(own, arm, seed, rate, folder, own.scale.steps)
    return Command(arguments, folder / "model" / "model.safetensors", own.scale.steps)


def train_last(own: Experiment, arm: Arm, seed: int, rates: dict[str, float]) -> Command:
    """Train an arm's student plainly, as every arm's, on text that none has seen."""
    run = own.run(arm, seed)
    arguments = [
        *_train(own, "last", run / "main" / "model", run / "last"),
        *("--method", "full", "--seed", seed, "--num-steps", own.scale.last_steps),
        *("--warmup-steps", own.scale.last_steps // 10, "--learning-rate", rates["full"] / 4),
    ]
    return Command(arguments, run / "last" / "model" / "model.safetensors", own.scale.last_steps)


def measure(own: Experiment, arm: Arm, seed: int) -> list[Command]:
    """Measure a run before and after its last stage, and what it would keep."""
    run = own.run(arm, seed)
    sets = [f"{name}={own.output / 'text' / f'held_{name}.jsonl'}" for name in HELD_OUT]
    models = ["--students", *(run / stage / "model" for stage in ("main", "last"))]
    arguments = [HERE / "measure.py", *sets, *models, "--seq-length", own.scale.seq_length]
    commands = [Command([*arguments, *_half()], run / "last" / "model" / "measures.json")]
    if arm.data == "noisy":
        commands.append(_kept(own, run / "main" / "model", run / "kept.json"))
    return commands


def make_table(own: Experiment) -> list[Command]:
    """Compare the runs."""
    return [Command([HERE / "table.py", own.output], own.output / "table.md")]


def perform(own: Experiment, commands: Iterable[Command], name: str) -> None:
    """Run what is not done yet, several at one time; write down commands and seconds.

    Raises:
        SystemExit: a command failed; names it and its log.
    """
    left = [command for command in commands if not command.result.exists()]
    if not left:
        return
    total = sum(command.cost for command in left)
    with ThreadPoolExecutor(own.jobs) as pool, tqdm(total=total, desc=name, unit="") as bar:
        for command in pool.map(lambda command: _run(own, command), left):
            bar.update(command.cost)


def _run(own: Experiment, command: Command) -> Command:
    words = [sys.executable, *map(str, command.arguments)]
    name = str(command.result.relative_to(own.output)).replace("/", "--")
    log = own.output / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    with (own.output / "commands.log").open("a", encoding="utf-8") as file:
        file.write(shlex.join(words) + "\n")
    # One thread: sums in the same order on every machine, and runs side by side.
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    threads["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(words, env=os.environ | threads, stdout=file, stderr=file)
    if done.returncode not in command.accepted:
        raise SystemExit(f"{shlex.join(words)}\nended with {done.returncode}: see {log}")
    seconds = {"result": name, "seconds": round(time.monotonic() - started, 1)}
    with (own.output / "seconds.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(seconds) + "\n")
    if not command.result.exists():
        command.result.touch()
    return command


def _train_arm(
    own: Experiment, arm: Arm, seed: int, rate: float, folder: Path, num_steps: int
) -> list[object]:
    share = [] if arm.keep_fraction is None else ["--keep-fraction", arm.keep_fraction]
    stored = ["--stored-losses", own.teacher] if arm.needs_losses else []
    return [
        *_train(own, arm.data, own.healed, folder),
        *("--method", arm.method, *share, *stored, "--seed", seed, "--num-steps", num_steps),
        *("--warmup-steps", own.scale.warmup_steps, "--learning-rate", rate),
        *("--evaluate-every", own.scale.evaluate_every),
    ]


def _train(own: Experiment, data: str, student: Path, folder: Path) -> list[object]:
    scale = own.scale
    return [
        *("-m", "pipeline.training", "--data", own.output / data, "--student", student),
        *("--output", folder, "--heldout", f"dev={own.output / 'dev'}"),
        *("--seq-length", scale.seq_length, "--global-batch-size", scale.batch_size),
        *("--micro-batch-size", scale.batch_size, "--num-epochs", scale.num_epochs),
        *("--checkpoint-every", scale.evaluate_every, *_half()),
    ]


def _kept(own: Experiment, student: Path, result: Path) -> Command:
    rows = ["--seq-length", own.scale.seq_length, "--micro-batch-size", own.scale.batch_size]
    data = ["--data", own.output / "noisy", "--teacher", own.teacher, "--student", student]
    arguments = [HERE / "kept.py", *data, *rows, "--output", result, *_half()]
    return Command(arguments, result, accepted=(0, 3))


def _half() -> list[str]:
    return ["--bf16"] if half_precision() else []


def half_precision() -> bool:
    """Say whether this machine's processor multiplies in bfloat16; others are slower in it."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "avx512_bf16" in flags.read_text("utf-8")


if __name__ == "__main__":
    sys.exit(main())
