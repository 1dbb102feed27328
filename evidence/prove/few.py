"""Few documents, many passes: is a teacher's distribution worth more than plain training?

evidence/few.md says what is compared and what counts.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from prove.compare import Records, best_arm, both_overviews, compare, find_missing, read_records
from prove.experiment import TINY, Arm, Base, Experiment
from prove.texts import HELD_OUT_PACKAGES, Document, Texts, read_pools

SEED = 20
PLAIN = ("full", "full-decay-1", "full-decay-3", "full-dropout")
DISTILL = ("distill", "distill-kept")
CELLS_PLAIN, CELLS = ("full", "full-decay-3", "full-dropout"), ("cells",)
DECIDING = ("gsm8k", "math")
KNOWN = ("docstrings", "mmlu_stem")
_SHARED = ("--method", "distill", "--weight", 0.8)

ARMS = (
    Arm(name="full", options=("--method", "full")),
    Arm(name="distill", options=_SHARED, scored=True),
    Arm(name="full-decay-1", options=("--method", "full", "--weight-decay", 1), order=1),
    Arm(name="full-dropout", options=("--method", "full"), program=("dropout.py", 0.1), order=1),
    Arm(name="full-decay-3", options=("--method", "full", "--weight-decay", 3), order=2),
    Arm(name="distill-kept", options=(*_SHARED, "--distill-tokens", "kept"), scored=True, order=3),
    Arm(name="alm", options=("--method", "alm"), scored=True, order=4),
    Arm(name="teacher", options=("--method", "teacher"), scored=True, order=4),
)


def build(
    data: Path,
    healing: Sequence[Document],
    *,
    train: tuple[int, int],
    development: int,
    held: Mapping[str, int],
    packages: Sequence[str] = HELD_OUT_PACKAGES,
) -> Texts:
    """Draw all texts.

    Args:
        data: folder of the sets.
        healing: what the student has read before.
        train: documents of GSM8K and of MATH to train on.
        development: further documents of each.
        held: documents of each held-out set.
        packages: whose docstrings are held out.
    """
    pool, sets = read_pools(data, healing, held, packages)
    order = random.Random(SEED)
    texts: Texts = {"train": [], "dev": []}
    for source, count in zip(("gsm8k_train", "math"), train, strict=True):
        own = [document for document in pool if document.source.startswith(source)]
        order.shuffle(own)
        texts["train"] += own[:count]
        texts["dev"] += own[count : count + development]
    return texts | sets


def judge(folder: Path, plain: Sequence[str] = PLAIN, distill: Sequence[str] = DISTILL) -> str:
    """Return the tables and the verdicts, by the rules of evidence/few.md."""
    records = read_records(folder)
    tables = both_overviews(records, (*DECIDING, *KNOWN), "full")
    return f"# Few documents, many passes\n\n{verdict(records, plain, distill)}\n{tables}"


def verdict(
    records: Records,
    plain_arms: Sequence[str] = PLAIN,
    distill_arms: Sequence[str] = DISTILL,
    num_seeds: int = 3,
) -> str:
    """Return what the rules say, and which runs are missing."""
    missing = find_missing(records, (*plain_arms, *distill_arms), num_seeds)
    if {"full", distill_arms[0]} - records.keys():
        return f"Not finished: neither `full` nor `{distill_arms[0]}` can be compared yet."
    own = best_arm(records, [name for name in distill_arms if name in records])
    plain = best_arm(records, [name for name in plain_arms if name in records])
    found = {name: compare(records, own, plain, name) for name in (*DECIDING, *KNOWN)}
    wins = all(found[name].is_below_zero for name in DECIDING)
    loses = all(found[name].mean >= 0 for name in DECIDING)
    rule = "for distributions" if wins else "against" if loses else "undecided"
    said = f"**Not finished**: {missing}." if missing else f"By the rules: **{rule}**."
    lines = [f"- {name}: {difference}" for name, difference in found.items()]
    return "\n".join([f"`{own}` less `{plain}`, bits per byte:", *lines, "", said])


_HELD = {"gsm8k": 120, "math": 120, "docstrings": 40, "mmlu_stem": 60}
_BUILD = partial(build, train=(130, 70), development=40, held=_HELD)
FULL = Experiment(
    name="few",
    build=_BUILD,
    aligned=("train", "dev"),
    scored={"train": ("--top-k", 16, "--draws", 0)},
    arms=ARMS,
    units=20,
    search_units=6,
    measured=tuple(range(1, 21)),
    judge=judge,
)
_SMALL_HELD = {"gsm8k": 60, "math": 40, "docstrings": 20, "mmlu_stem": 60}
_TINY_HELD = dict.fromkeys(_HELD, 4)
_GPU_HELD = {"gsm8k": 1000, "math": 400, "docstrings": 200, "mmlu_stem": 1000}
SMALL = replace(
    FULL,
    base=Base(batch_size=2, heal_until=200),
    build=partial(_BUILD, train=(26, 14), development=10, held=_SMALL_HELD),
    units=10,
    search_units=3,
    measured=None,
)
CELLS_ARMS = (
    *(replace(arm, order=0) for arm in ARMS if arm.name in CELLS_PLAIN),
    Arm(name="cells", options=(*_SHARED, "--distill-map", "cells"), scored=True),
)
SCALES = {
    "full": FULL,
    "small": SMALL,
    "cells": replace(
        SMALL,
        base=replace(SMALL.base, precision="float32"),
        scored={"train": ("--top-k", 8, "--draws", 4)},
        arms=CELLS_ARMS,
        judge=partial(judge, plain=CELLS_PLAIN, distill=CELLS),
    ),
    "tiny": replace(
        FULL,
        base=TINY,
        build=partial(build, train=(8, 6), development=4, held=_TINY_HELD, packages=("tqdm",)),
        units=2,
        search_units=1,
        measured=(1, 2),
        seeds=(0,),
    ),
    "gpu": replace(FULL, base=Base(device="cuda"), build=partial(_BUILD, held=_GPU_HELD)),
}
