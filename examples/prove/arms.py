"""What is compared, and how large the experiment is."""

from dataclasses import dataclass

SEARCHED = ("full", "teacher", "alm")
SELECTORS = ("random", "teacher", "teacher_loss", "student_loss", "student_entropy")
_NEED_LOSSES = ("teacher", "teacher_loss", "alm")


@dataclass(frozen=True)
class Arm:
    """One way to train the student.

    Attributes:
        method: of `vocag train`.
        data: noisy or clean.
        seeds: one run each.
        keep_fraction: k; None where the method has none, or its default is meant.
    """

    method: str
    data: str
    seeds: tuple[int, ...]
    keep_fraction: float | None = None

    @property
    def label(self) -> str:
        """Name of the arm's folder: method and k."""
        return self.method if self.keep_fraction is None else f"{self.method}-{self.keep_fraction}"

    @property
    def needs_losses(self) -> bool:
        """Whether it reads the teacher's stored losses."""
        return self.method in _NEED_LOSSES


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of an experiment.

    Attributes:
        packages: whose docstrings the student is healed on.
        held_out_packages: whose docstrings are held out.
        num_general: docstrings at most.
        num_documents: clean mathematical documents at most.
        num_held_out: documents of each held-out set at most.
        vocab_size: of the student.
        layers: of the teacher that the student keeps.
        seq_length: student tokens per row.
        batch_size: rows per step.
        num_epochs: how often data may be read.
        heal_steps: of healing.
        heal_rate: learning rate of healing.
        steps: of every arm.
        last_steps: of the last stage.
        warmup_steps: of healing and of every arm.
        evaluate_every: steps between measurements on the development set, and checkpoints.
        rates: learning rates that are searched.
        selectors: that are compared beside `full` and `alm`.
        seeds: of every arm.
    """

    packages: tuple[str, ...] = ("numpy", "scipy", "sympy")
    held_out_packages: tuple[str, ...] = ("networkx",)
    num_general: int = 100_000
    num_documents: int = 100_000
    num_held_out: int = 500
    vocab_size: int = 8192
    layers: tuple[int, ...] = (0, 1, 2, 15, 28, 29)
    seq_length: int = 512
    batch_size: int = 4
    num_epochs: int = 4
    heal_steps: int = 1000
    heal_rate: float = 1e-3
    steps: int = 500
    last_steps: int = 100
    warmup_steps: int = 20
    evaluate_every: int = 100
    rates: tuple[float, ...] = (2e-4, 4e-4, 8e-4)
    selectors: tuple[str, ...] = SELECTORS
    seeds: tuple[int, ...] = (0, 1, 2)


SCALES = {
    "full": Scale(),
    # Shows that the chain works, in minutes, and nothing else.
    "tiny": Scale(
        packages=("numpy",),
        held_out_packages=("tqdm",),
        num_general=150,
        num_documents=60,
        num_held_out=8,
        vocab_size=512,
        layers=(0, 29),
        seq_length=128,
        batch_size=2,
        num_epochs=20,
        heal_steps=6,
        steps=8,
        last_steps=2,
        warmup_steps=1,
        evaluate_every=2,
        rates=(1e-3,),
        selectors=("random", "teacher"),
        seeds=(0, 1),
    ),
}


def arms_of(scale: Scale) -> list[Arm]:
    """Return every arm; `full` and `alm` alone have no k.

    Example:
        >>> sum(len(arm.seeds) for arm in arms_of(SCALES["full"]))
        36
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
    ]
