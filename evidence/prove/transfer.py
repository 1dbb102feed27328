"""Another tokenizer for a model: which training brings back most where it was never trained?

evidence/transfer.md says what is compared and what counts.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from prove.compare import (
    Difference,
    Records,
    best_arm,
    bits_per_byte,
    common_seeds,
    difference_of,
    find_missing,
    nats_less,
    read_records,
    sums_of,
    table,
)
from prove.experiment import TINY, Arm, Base, Experiment
from prove.texts import HELD_OUT_PACKAGES, Document, Texts, read_pools

SEED = 22
DOMAIN = ("gsm8k", "math")
ELSEWHERE = ("docstrings", "mmlu_stem", "tabmwp")
SETS = (*DOMAIN, *ELSEWHERE)
PLAIN, DISTILL = "plain", ("distill", "distill-plain")
ARMS = (
    Arm(name=PLAIN, options=("--method", "full")),
    Arm(name="distill", options=("--method", "distill", "--weight", 1.0), scored=True),
    Arm(name="distill-plain", options=("--method", "distill", "--weight", 0.5), scored=True),
    Arm(name="alm", options=("--method", "alm"), scored=True),
)


def _and_longer(units: int) -> tuple[Arm, ...]:
    """Return the arms, and plain training of half as many steps again.

    That is more than scoring costs of what a run reads.
    """
    return (*ARMS, replace(ARMS[0], name="plain-longer", rate=PLAIN, order=1, units=3 * units // 2))


def build(
    data: Path,
    healing: Sequence[Document],
    *,
    train: int,
    development: int,
    held: int,
    packages: Sequence[str] = HELD_OUT_PACKAGES,
) -> Texts:
    """Draw all texts.

    Args:
        data: folder of the sets.
        healing: docstrings that no held-out text may share anything with.
        train: documents to train on.
        development: further documents.
        held: documents of each held-out set.
        packages: whose docstrings are held out.
    """
    pool, sets = read_pools(data, healing, dict.fromkeys(SETS, held), packages)
    return draw_texts(pool, train, development) | sets


def draw_texts(pool: Sequence[Document], train: int, development: int) -> Texts:
    """Return documents to train on, and further ones, drawn from a pool."""
    drawn = list(pool)
    random.Random(SEED).shuffle(drawn)
    return {"train": drawn[:train], "dev": drawn[train : train + development]}


def shares(records: Records, arm: str, at: str = "last") -> dict[int, dict[str, float]]:
    """Return by seed and set the share of the lost bits per byte that came back.

    (transplanted - healed) / (transplanted - original); `elsewhere` is the mean of the domains that
    were never trained on.
    """
    original, start = records["original"][0], records["start"][0]
    found: dict[int, dict[str, float]] = {}
    for seed, record in records[arm].items():
        found[seed] = {}
        for name in SETS:
            before = bits_per_byte(start, name, "last")
            lost = before - bits_per_byte(original, name, "last")
            found[seed][name] = (before - bits_per_byte(record, name, at)) / lost
        found[seed]["elsewhere"] = fmean(found[seed][name] for name in ELSEWHERE)
    return found


def compare_shares(
    records: Records, own: str, other: str, sets: Sequence[str], at: str = "last"
) -> Difference:
    """Return how much more of the lost bits per byte came back by one arm, mean over sets.

    Args:
        records: of all runs.
        own: an arm.
        other: the one that it is compared with.
        sets: whose shares are averaged.
        at: unit of both.
    """
    start, original = (
        {name: np.array(sums_of(records[model][0], name, "last")["nats"]) for name in sets}
        for model in ("start", "original")
    )
    by_set = [
        (nats_less(records, other, own, name, at), start[name] - original[name]) for name in sets
    ]
    return difference_of(common_seeds(records, own, other), by_set)


def means(records: Records, arms: Sequence[str]) -> str:
    """Return every arm's mean shares, and in parentheses its differences to plain training."""
    rows = []
    for arm in arms:
        own = shares(records, arm)
        cells: list[object] = [f"`{arm}`", f"{next(iter(records[arm].values()))['rate']:g}"]
        for name in (*SETS, "elsewhere"):
            sets = ELSEWHERE if name == "elsewhere" else (name,)
            less = "" if arm == PLAIN else f" ({compare_shares(records, arm, PLAIN, sets)})"
            cells.append(f"{fmean(values[name] for values in own.values()):.3f}{less}")
        rows.append(cells)
    return table(["arm", "rate", *SETS, "elsewhere"], rows)


def judge(folder: Path) -> str:
    """Return the tables and the verdict, by the rules of evidence/transfer.md."""
    records = read_records(folder)
    parts = ["# Another tokenizer", "", verdict(records), ""]
    return "\n".join([*parts, share_tables(records)])


def share_tables(records: Records) -> str:
    """Return the means of every arm, and its shares run by run, as Markdown."""
    arms = sorted(records.keys() - {"original", "start"})
    rows = [
        [f"`{arm}`", seed, *(f"{100 * own[name]:.1f} %" for name in SETS)]
        for arm in arms
        for seed, own in shares(records, arm).items()
    ]
    parts = ["## Share of the lost bits per byte that came back", ""]
    if PLAIN in arms:
        parts += [means(records, arms), "Run by run:", ""]
    return "\n".join([*parts, table(["arm", "seed", *SETS], rows)])


def verdict(records: Records, num_seeds: int = 3) -> str:
    """Return what the rules say, or which runs are missing."""
    if missing := find_missing(records, (PLAIN, *DISTILL), num_seeds):
        return f"Not finished: {missing}."
    best = best_arm(records, DISTILL)
    found = compare_shares(records, best, PLAIN, ELSEWHERE)
    wins = min(found.values.values()) > 0 and found.mean - found.half_width > 0
    rule = "for distributions" if wins else "against" if found.mean <= 0 else "undecided"
    return f"`{best}` less plain elsewhere: {found}. By the rules: **{rule}**."


FULL = Experiment(
    name="transfer",
    build=partial(build, train=700, development=40, held=60),
    aligned=("train", "dev"),
    scored={"train": ("--top-k", 16, "--draws", 0)},
    arms=_and_longer(4),
    unit=50,
    units=4,
    search_units=1,
    first_rate=2e-4,
    warmup_steps=10,
    measured=(1, 2, 4),
    judge=judge,
)
SCALES = {
    "full": FULL,
    "small": replace(
        FULL,
        base=Base(batch_size=2),
        build=partial(build, train=300, development=20, held=30),
        arms=_and_longer(2),
        unit=20,
        units=2,
        measured=(1, 2),
    ),
    "tiny": replace(
        FULL,
        base=TINY,
        build=partial(build, train=40, development=4, held=4, packages=("tqdm",)),
        arms=ARMS[:2],
        unit=2,
        units=1,
        warmup_steps=1,
        measured=(1,),
        seeds=(0,),
    ),
    "gpu": replace(
        FULL,
        base=Base(device="cuda", batch_size=32),
        build=partial(build, train=5000, development=200, held=500),
    ),
}
