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
        heal_warmup_steps: of healing.
        checkpoint_every: steps between checkpoints.
        seq_length: student tokens per row.
        batch_size: rows per step.
        shard_bytes: of a shard; scoring resumes at the shard that it was at.
        device: trains, scores and measures.
    """

    layers: tuple[int, ...] = (0, 1, 2, 15, 28, 29)
    vocab_size: int = 8192
    packages: tuple[str, ...] = HEALING_PACKAGES
    num_general: int = 100_000
    heal_steps: int = 1000
    heal_until: int = 1000
    heal_rate: float = 1e-3
    heal_warmup_steps: int = 20
    checkpoint_every: int = 100
    seq_length: int = 512
    batch_size: int = 4
    shard_bytes: str = "2MiB"
    device: str = "cpu"


TINY = Base(
    layers=(0, 29),
    vocab_size=512,
    packages=("numpy",),
    num_general=150,
    heal_steps=6,
    heal_until=6,
    heal_warmup_steps=1,
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
        rate: learning rate; None: searched for this arm; a name: that arm's.
        dropout: share of attention weights, and of what each block's two parts add, set to 0.
        units: how long the run is; None: as long as the experiment says.
        seeds: None: the experiment's.
        order: arms with smaller numbers run first, in all seeds.
        where: returns the condition for documents, from the folder of the experiment.
    """

    name: str
    options: tuple[object, ...] = ()
    data: str = "train"
    scored: bool = False
    rate: float | str | None = None
    dropout: float = 0.0
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


Builder = Callable[[Path, Sequence[Document]], Texts]
"""Makes all texts, from the folder of the sets and the text that heals."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question, at one scale.

    Attributes:
        name: of the experiment.
        scale: of its sizes.
        base: the student.
        build: makes the texts; sets to measure on are named `held_NAME`.
        aligned: texts that are aligned.
        scored: options of `vocag score` by the text that is scored.
        metadata: fields of the texts that conditions name.
        arms: what is compared.
        unit: steps between measurements; None: a pass over the text `train`.
        units: length of a run.
        search_units: units after which learning rates are compared.
        warmup_steps: of a run; None: half a unit.
        measures_start: measure the model that all arms begin with on the text `train`.
        first_rate: where the search begins; it doubles and halves while that is better.
        measured: units at which the sets are measured; None: the best of the development set, and
            the last.
        stages: what follows each run.
        seeds: one run each: order of rows, random choices, dropout.
        tokenizer: of another vocabulary for all of SmolLM2-135M; None: the healed student.
        judge: returns the verdicts as Markdown, from the folder of the records.
    """

    name: str
    scale: str
    base: Base
    build: Builder
    aligned: tuple[str, ...]
    scored: Mapping[str, tuple[object, ...]]
    metadata: tuple[str, ...] = ()
    arms: tuple[Arm, ...]
    unit: int | None = None
    units: int
    search_units: int
    warmup_steps: int | None = None
    measures_start: bool = False
    first_rate: float = 1e-3
    measured: tuple[int, ...] | None = None
    stages: tuple[Stage, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    tokenizer: Path | None = None
    judge: Callable[[Path], str] = field(repr=False)

    def arm(self, name: str) -> Arm:
        """Return the arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)
