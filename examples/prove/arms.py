"""What is compared, and how large the experiment is."""

from dataclasses import dataclass
from typing import Any, Literal

SEARCHED = ("full", "teacher", "alm")
SELECTORS = ("random", "teacher", "teacher_loss", "student_loss", "student_entropy")
DECIDING = {
    "noisy": ("full", "random-0.4", "teacher-0.4", "teacher-0.6", "teacher_loss-0.4"),
    "clean": ("full", "teacher-0.4"),
}
"""What the verdicts rest on (docs/evidence.md), but for that on equal compute."""
NEED_LOSSES = ("teacher", "teacher_loss", "alm")


@dataclass(frozen=True)
class Arm:
    """One way to train the student.

    Attributes:
        method: of `vocag train`.
        data: noisy or clean.
        seeds: one run each.
        keep_fraction: k; None where the method has none, or its default is meant.
        compute: "" for as many steps as everybody; else as many as the same arithmetic allows that
            `teacher` needs at k = 0.4, its student's alone (`student`) or the teacher's scoring of
            what it reads counted, too (`scored`).
    """

    method: str
    data: str
    seeds: tuple[int, ...]
    keep_fraction: float | None = None
    compute: Literal["", "student", "scored"] = ""

    @property
    def label(self) -> str:
        """Name of the arm's folder: method and k, or what its number of steps equals."""
        if self.compute:
            return f"{self.method}-equal-{self.compute}"
        return self.method if self.keep_fraction is None else f"{self.method}-{self.keep_fraction}"

    @property
    def decides(self) -> bool:
        """Whether a verdict rests on it, but for that on equal compute."""
        return self.label in DECIDING[self.data]

    @property
    def needs_losses(self) -> bool:
        """Whether it reads the teacher's stored losses."""
        return self.method in NEED_LOSSES


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of an experiment.

    Attributes:
        packages: whose docstrings the student is healed on.
        held_out_packages: whose docstrings are held out.
        num_general: docstrings at most.
        num_documents: clean mathematical documents at most.
        num_trained: of them in the mixtures at most, the rest of which nobody would read.
        num_held_out: problems of each held-out set at most.
        num_held_out_general: held-out docstrings at most.
        num_asked: problems of each set that `vocag evaluate` asks.
        vocab_size: of the student.
        layers: of SmolLM2-135M that the student keeps.
        shard_bytes: of a shard; a scoring that is killed goes on at the shard that it was at.
        seq_length: student tokens per row.
        batch_size: rows per step.
        num_epochs: how often data may be read.
        heal_steps: of healing.
        heal_rate: learning rate of healing.
        heal_warmup_steps: of healing.
        steps: of every arm.
        search_steps: of the runs that search a learning rate.
        last_steps: of the last stage.
        warmup_steps: of every arm.
        num_counted: rows of which is counted, after training, what the teacher's choice keeps.
        checkpoint_every: steps between checkpoints, and between measurements on the development set
            while the student heals.
        rates: learning rates that are searched.
        selectors: that are compared beside `full` and `alm`.
        seeds: of every arm.
        num_questioned: seeds, the first ones, whose students `vocag evaluate` asks, and of which is
            counted what the teacher's choice keeps.
        device: that scores, trains and measures.
    """

    packages: tuple[str, ...] = ("numpy", "scipy", "sympy")
    held_out_packages: tuple[str, ...] = ("networkx",)
    num_general: int = 100_000
    num_documents: int = 100_000
    num_trained: int = 1300
    num_held_out: int = 120
    num_held_out_general: int = 60
    num_asked: int = 50
    vocab_size: int = 8192
    layers: tuple[int, ...] = (0, 1, 2, 15, 28, 29)
    shard_bytes: str = "2MiB"
    seq_length: int = 512
    batch_size: int = 4
    num_epochs: int = 4
    heal_steps: int = 1000
    heal_rate: float = 1e-3
    heal_warmup_steps: int = 20
    steps: int = 56
    search_steps: int = 28
    last_steps: int = 14
    warmup_steps: int = 8
    num_counted: int = 60
    checkpoint_every: int = 100
    rates: tuple[float, ...] = (2e-4, 4e-4, 8e-4, 1.6e-3)
    selectors: tuple[str, ...] = SELECTORS
    seeds: tuple[int, ...] = (0, 1, 2)
    num_questioned: int = 1
    device: str = "cpu"


FULL = Scale()
# How larger experiments are measured: on more text, every seed likewise.
_WELL_MEASURED: dict[str, Any] = {
    "num_held_out": 500,
    "num_held_out_general": 200,
    "num_asked": 200,
    "num_counted": 200,
    "num_questioned": 3,
}
# The same with seven times as many steps: ten hours on two cores.
LONG = Scale(
    **_WELL_MEASURED,
    num_trained=5000,
    steps=400,
    search_steps=100,
    last_steps=100,
    warmup_steps=20,
)
# Shows that the chain works, in minutes, and nothing else.
TINY = Scale(
    packages=("numpy",),
    held_out_packages=("tqdm",),
    num_general=150,
    num_documents=60,
    num_held_out=8,
    num_held_out_general=8,
    num_asked=4,
    vocab_size=512,
    layers=(0, 29),
    seq_length=128,
    batch_size=2,
    num_epochs=20,
    heal_steps=6,
    heal_warmup_steps=1,
    steps=8,
    search_steps=2,
    last_steps=2,
    warmup_steps=1,
    checkpoint_every=2,
    rates=(1e-3,),
    selectors=("random", "teacher"),
    seeds=(0, 1),
)
# For one GPU: a student of 101 M parameters, 100 M tokens an arm.
GPU = Scale(
    **_WELL_MEASURED,
    num_documents=10_000_000,
    num_trained=10_000_000,
    vocab_size=16_384,
    layers=(*range(24), 28, 29),
    shard_bytes="64MiB",
    batch_size=64,
    heal_steps=300,
    heal_rate=5e-4,
    heal_warmup_steps=100,
    steps=3052,
    search_steps=763,
    last_steps=300,
    warmup_steps=100,
    checkpoint_every=500,
    rates=(1e-4, 2e-4, 4e-4),
    device="cuda",
)
SCALES = {"full": FULL, "long": LONG, "tiny": TINY, "gpu": GPU}


def arms_of(scale: Scale) -> list[Arm]:
    """Return every arm; `full` and `alm` alone have no k.

    Example:
        >>> sum(len(arm.seeds) for arm in arms_of(SCALES["full"]))
        40
    """
    selectors = scale.selectors
    seeds, first = scale.seeds, scale.seeds[:1]
    return [
        *(Arm(method, "noisy", seeds) for method in ("full", "alm")),
        *(Arm(method, "noisy", seeds, 0.4) for method in selectors),
        *(Arm(method, "noisy", first, 0.6) for method in selectors),
        Arm("alm", "noisy", first, 0.4),
        Arm("full", "clean", seeds),
        *(Arm(m, "clean", seeds, 0.4) for m in selectors if m in ("random", "teacher")),
        Arm("full", "noisy", seeds, compute="scored"),
        Arm("full", "noisy", first, compute="student"),
    ]
