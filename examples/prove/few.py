"""Few documents, many passes: is a teacher's distribution worth more than plain training?

docs/evidence/few.md says what is compared and what counts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prove.compare import Records, best_arm, both_overviews, compare, read_records
from prove.experiment import TINY, Arm, Base, Experiment
from prove.texts import HELD_OUT_PACKAGES, Document, Texts, read_pools

SEED = 20
PLAIN = ("full", "full-decay-1", "full-decay-3", "full-dropout")
DISTILL = ("distill", "distill-kept")
DECIDING = ("gsm8k", "math")
KNOWN = ("docstrings", "mmlu_stem")
_SHARED = ("--method", "distill", "--weight", 0.8)

ARMS = (
    Arm(name="full", options=("--method", "full")),
    Arm(name="distill", options=_SHARED, scored=True),
    Arm(name="full-decay-1", options=("--method", "full", "--weight-decay", 1), order=1),
    Arm(name="full-dropout", options=("--method", "full"), dropout=0.1, order=1),
    Arm(name="full-decay-3", options=("--method", "full", "--weight-decay", 3), order=2),
    Arm(name="distill-kept", options=(*_SHARED, "--distill-tokens", "kept"), scored=True, order=3),
    Arm(name="alm", options=("--method", "alm"), scored=True, order=4),
    Arm(name="teacher", options=("--method", "teacher"), scored=True, order=4),
)


@dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
        train: documents of GSM8K and of MATH to train on.
        development: further documents of each.
        held: documents of each held-out set.
    """

    train: tuple[int, int]
    development: int
    held: dict[str, int]
    packages: tuple[str, ...] = HELD_OUT_PACKAGES


_HELD = {"gsm8k": 120, "math": 120, "docstrings": 40, "mmlu_stem": 60}
SIZES = {
    "full": Size((130, 70), 40, _HELD),
    "small": Size((26, 14), 10, {"gsm8k": 60, "math": 40, "docstrings": 20, "mmlu_stem": 60}),
    "tiny": Size((8, 6), 4, dict.fromkeys(_HELD, 4), ("tqdm",)),
    "gpu": Size((130, 70), 40, {"gsm8k": 1000, "math": 400, "docstrings": 200, "mmlu_stem": 1000}),
}


def experiment(scale: str) -> Experiment:
    """Return the experiment at a scale."""
    bases = {
        "full": Base(),
        "small": Base(batch_size=2, heal_until=200),
        "tiny": TINY,
        "gpu": Base(device="cuda"),
    }
    passes, search = {"small": (10, 3), "tiny": (2, 1)}.get(scale, (20, 6))
    return Experiment(
        name="few",
        scale=scale,
        base=bases[scale],
        build=partial(build, SIZES[scale]),
        aligned=("train", "dev"),
        scored={"train": ("--top-k", 16)},
        arms=ARMS,
        units=passes,
        search_units=search,
        measured=None if scale == "small" else tuple(range(1, passes + 1)),
        judge=judge,
        seeds=(0,) if scale == "tiny" else (0, 1, 2),
    )


def build(size: Size, data: Path, healing: Sequence[Document]) -> Texts:
    """Draw all texts."""
    pools = read_pools(data, healing, size.held, size.packages)
    order = random.Random(SEED)
    train, development = [], []
    for source, count in zip(("gsm8k_train", "math"), size.train, strict=True):
        own = [document for document in pools.train if document.source.startswith(source)]
        order.shuffle(own)
        train += own[:count]
        development += own[count : count + size.development]
    held = {f"held_{name}": pools.held[name][:count] for name, count in size.held.items()}
    return {"train": train, "dev": development, **held}


def judge(folder: Path) -> str:
    """Return the tables and the verdicts, by the rules of docs/evidence/few.md."""
    records = read_records(folder)
    tables = both_overviews(records, (*DECIDING, *KNOWN), "full")
    return "\n".join(["# Few documents, many passes", "", verdict(records), "", tables])


def verdict(records: Records, num_seeds: int = 3) -> str:
    """Return what the rules say, and which runs are missing."""
    missing = [
        f"{name} ({len(records.get(name, {}))} of {num_seeds})"
        for name in (*PLAIN, *DISTILL)
        if len(records.get(name, {})) < num_seeds
    ]
    if {"full", "distill"} - records.keys():
        return "Not finished: neither `full` nor `distill` can be compared yet."
    own = best_arm(records, [name for name in DISTILL if name in records])
    plain = best_arm(records, [name for name in PLAIN if name in records])
    found = {name: compare(records[own], records[plain], name) for name in (*DECIDING, *KNOWN)}
    wins = all(found[name].is_below_zero for name in DECIDING)
    loses = all(found[name].mean >= 0 for name in DECIDING)
    lines = [f"`{own}` less `{plain}`, bits per byte:"]
    lines += [f"- {name}: {difference}" for name, difference in found.items()]
    if missing:
        lines += ["", f"**Not finished**; seeds that are there: {', '.join(missing)}."]
    else:
        rules = "for distributions" if wins else "against" if loses else "undecided"
        lines += ["", f"By the rules: **{rules}**."]
    return "\n".join(lines)
