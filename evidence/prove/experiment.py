"""What an experiment declares: its texts, its arms, its sizes and what it measures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prove.texts import HEALING_PACKAGES, Document, Texts


@dataclass(frozen=True, kw_only=True)
class Base:
    """The student that experiments share, and how it is trained.

    Attributes:
        layers: of SmolLM2-135M that the student keeps.
        vocab_size: tokens of the student's own byte-level BPE.
        packages: whose docstrings the student is healed on.
        num_general: docstrings at most.
        heal_steps: length of the healing's schedule.
        heal_until: step at which healing ends.
        heal_rate: peak learning rate of healing.
        checkpoint_every: steps between checkpoints.
        seq_length: student tokens per row.
        batch_size: rows per step.
        device: trains, scores and measures.
        precision: in which it computes; None: bfloat16 where the device multiplies in it.
    """

    layers: tuple[int, ...] = (0, 1, 2, 15, 28, 29)
    vocab_size: int = 8192
    packages: tuple[str, ...] = HEALING_PACKAGES
    num_general: int = 100_000
    heal_steps: int = 1000
    heal_until: int = 1000
    heal_rate: float = 1e-3
    checkpoint_every: int = 100
    seq_length: int = 512
    batch_size: int = 4
    device: str = "cpu"
    precision: str | None = None

    @property
    def dtype(self) -> str:
        """bfloat16 where the processor multiplies in it; others are slower in it."""
        if self.precision is not None:
            return self.precision
        flags = Path("/proc/cpuinfo")
        half = flags.exists() and "avx512_bf16" in flags.read_text("utf-8")
        return "bfloat16" if half or self.device.startswith("cuda") else "float32"


TINY = Base(
    layers=(0, 29),
    vocab_size=512,
    packages=("numpy",),
    num_general=150,
    heal_steps=6,
    heal_until=6,
    checkpoint_every=2,
    seq_length=128,
    batch_size=2,
)
"""Shows in minutes that a chain works, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train the student.

    Attributes:
        name: of the arm.
        options: of `vocag train`.
        data: the text that is trained on.
        scored: whether it reads what the teacher has stored.
        running: whether the teacher runs next to the student.
        rate: learning rate; None: searched for this arm; a name: that arm's.
        program: a script here that stands for `vocag train`, and what it takes before the options.
        units: how long the run is; None: as long as the experiment says.
        seeds: None: the experiment's.
        order: arms with smaller numbers run first, in all seeds.
        where: returns the condition for documents, from the folder of the experiment.
    """

    name: str
    options: tuple[object, ...] = ()
    data: str = "train"
    scored: bool = False
    running: bool = False
    rate: float | str | None = None
    program: tuple[object, ...] = ()
    units: int | None = None
    seeds: tuple[int, ...] | None = None
    order: int = 0
    where: Callable[[Path], str] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Plain training after an arm's own, on text that no arm has seen, at a quarter of the rate.

    Attributes:
        name: under which its end is measured.
        data: text that is read.
        steps: of the stage.
        arms: names; empty: all arms.
    """

    name: str
    data: str
    steps: int
    arms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question, at one scale.

    Attributes:
        name: of the experiment.
        scale: of its sizes.
        base: the student.
        build: makes all texts, from the folder of the sets and the text that heals; sets to measure
            on are named `held_NAME`.
        aligned: texts that are aligned.
        scored: options of `vocag score` by the text that is scored.
        metadata: fields of the texts that conditions name.
        arms: what is compared.
        unit: steps between measurements; None: a pass over the text `train`.
        units: length of a run.
        search_units: units after which learning rates are compared.
        warmup_steps: of a run; None: half a unit.
        first_rate: where the search begins; it doubles and halves while that is better.
        measured: units at which the sets are measured; None: the best of the development set, and
            the last.
        prompts: texts, named `prompts_NAME`, that students go on with.
        numbers: whether measures have sums over packed numbers, too.
        start_measured: texts on which the model that all arms begin with is measured, too.
        stages: what follows each run.
        seeds: one run each: order of rows, random choices, dropout.
        tokenizer: of another vocabulary for all of SmolLM2-135M; None: the healed student.
        new_model: sizes of a student of random weights with that vocabulary; empty: SmolLM2.
        other_teacher: whether another model teaches, which the user names, all of SmolLM2-135M.
        teacher: the model that teaches; None: SmolLM2-135M.
        judge: returns the verdicts as Markdown, from the folder of the records.
    """

    name: str
    scale: str = "full"
    base: Base = Base()
    build: Callable[[Path, Sequence[Document]], Texts]
    aligned: tuple[str, ...]
    scored: Mapping[str, tuple[object, ...]]
    metadata: tuple[str, ...] = ()
    arms: tuple[Arm, ...]
    unit: int | None = None
    units: int
    search_units: int
    warmup_steps: int | None = None
    first_rate: float = 1e-3
    measured: tuple[int, ...] | None = None
    prompts: tuple[str, ...] = ()
    numbers: bool = False
    start_measured: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    tokenizer: Path | None = None
    new_model: tuple[object, ...] = ()
    other_teacher: bool = False
    teacher: str | None = None
    judge: Callable[[Path], str] = field(repr=False)
