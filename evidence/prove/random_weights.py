"""A student of random weights, read once: how much text is a teacher worth?

evidence/random_weights.md says what is compared and what counts.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from docstring_corpus import find_sources

from prove.code import verdict
from prove.compare import both_overviews, compare, read_records
from prove.experiment import Arm, Base, Experiment
from prove.texts import Document, Texts, healing_texts, read_questions, without_overlap

SEED = 24
PACKAGES = ("torch", "transformers", "numpy", "pandas", "apache_beam", "matplotlib", "numba")
HELD_OUT = ("networkx", "scipy", "sklearn", "sympy")
SETS = ("packages", "docstrings", "gsm8k")
CHARACTERS, LONGEST_LINE = 3000, 400
RANDOM = ("--random-init", "--method")
ARMS = (
    Arm(name="full", options=(*RANDOM, "full")),
    Arm(
        name="cells",
        options=(*RANDOM, "distill", "--weight", 0.5, "--distill-map", "cells"),
        scored=True,
    ),
    # Added when the others had run: how much of the difference is the rate's, or its fall's?
    Arm(name="full-faster", options=(*RANDOM, "full"), rate=2e-3, order=2),
    Arm(
        name="full-held",
        options=(*RANDOM, "full", "--min-lr-fraction", 0.55),
        rate="full",
        seeds=(0,),
        order=3,
    ),
)


def longer(units: int) -> Arm:
    """Return plain training of twice the text, in one pass as well."""
    return replace(
        ARMS[0], name="full-longer", data="more", rate="full", units=2 * units, order=1, seeds=(0,)
    )


def build(
    data: Path,
    healing: Sequence[Document],
    *,
    train: int,
    development: int,
    held: int,
    packages: Sequence[str] = PACKAGES,
    held_out: Sequence[str] = HELD_OUT,
) -> Texts:
    """Cut sources into windows.

    Args:
        data: folder of GSM8K.
        healing: not used; no student is healed.
        train: bytes to train on; `more` has twice as many, these among them.
        development: windows of the packages that are trained on.
        held: documents of each held-out set.
        packages: what is trained on.
        held_out: packages that are measured.
    """
    own = list(_windows(packages))
    random.Random(SEED).shuffle(own)
    texts: Texts = {"dev": own[:development], "train": [], "more": []}
    num_bytes = 0
    for document in own[development:]:
        if num_bytes < train:
            texts["train"].append(document)
        if num_bytes < 2 * train:
            texts["more"].append(document)
        num_bytes += document.num_bytes
    found = {"packages": list(_windows(held_out)), "docstrings": healing_texts(held_out)}
    found["gsm8k"] = read_questions(data, "gsm8k")
    for name, documents in found.items():
        random.Random(SEED).shuffle(documents)
        left = without_overlap(documents[: 4 * held], texts["more"])
        texts[f"held_{name}"] = left[:held]
    return texts


def _windows(packages: Sequence[str]) -> Iterator[Document]:
    """Yield all sources in pieces of whole lines, each once; what has long lines is data."""
    seen: set[str] = set()
    for package in packages:
        number = 0
        for path in sorted(find_sources(package).rglob("*.py")):
            lines: list[str] = []
            for line in path.read_text("utf-8", "ignore").splitlines(keepends=True):
                lines = [] if len(line) > LONGEST_LINE else [*lines, line]
                if sum(map(len, lines)) >= CHARACTERS:
                    text, lines = "".join(lines), []
                    if text not in seen:
                        yield Document("clean", package, number, text)
                    seen.add(text)
                    number += 1


def tokens_to_reach(curve: Sequence[float], bits: float, tokens: float) -> float | None:
    """Return after how many tokens a curve comes down to some bits per byte; None: it doesn't.

    Args:
        curve: bits per byte of the development set, unit by unit.
        bits: to be reached.
        tokens: of a unit.

    Example:
        >>> tokens_to_reach([3.0, 2.0, 1.5], 1.75, 100)
        250.0
    """
    for unit, (before, after) in enumerate(pairwise(curve), 1):
        if after <= bits < before:
            return tokens * (unit + (before - bits) / (before - after))
    return None


def judge(folder: Path, tokens: float = 122 * 4 * 512) -> str:
    """Return the tables and the verdict, by the rules of evidence/random_weights.md."""
    records = read_records(folder)
    parts = ["# Random weights", "", verdict(records, ("full",), ("cells",), SETS), ""]
    for other in ("full-faster", "full-held"):
        if {"cells", other} <= records.keys():
            found = ", ".join(f"{s} {compare(records, 'cells', other, s)}" for s in SETS)
            parts.append(f"- `cells` less `{other}`: {found}")
    if {"cells", "full-longer"} <= records.keys():
        bits = fmean(record["development"][-1] for record in records["cells"].values())
        reached = tokens_to_reach(records["full-longer"][0]["development"], bits, tokens)
        said = "not within its length" if reached is None else f"after {reached / 1e6:.2f} M tokens"
        parts.append(f"`full-longer` is where `cells` ends, {bits:.3f} bits per byte, {said}.")
    return "\n".join(parts) + both_overviews(records, SETS, "full")


FULL = Experiment(
    name="random_weights",
    base=Base(batch_size=4, precision="float32", checkpoint_every=122),
    build=partial(build, train=5_200_000, development=30, held=60),
    aligned=("train", "more", "dev"),
    scored={"train": ("--top-k", 8, "--draws", 4)},
    arms=(*ARMS, longer(6)),
    unit=122,
    units=6,
    search_units=2,
    first_rate=2e-3,
    warmup_steps=50,
    new_model=("--layers", 3, "--hidden", 192),
    judge=judge,
)
SCALES = {
    "full": FULL,
    "gpu": replace(
        FULL,
        base=Base(batch_size=16, device="cuda", checkpoint_every=146),
        build=partial(build, train=20_000_000, development=60, held=200),
        arms=(*ARMS, longer(5)),
        unit=146,
        units=5,
        new_model=("--layers", 12, "--hidden", 576),
        judge=partial(judge, tokens=146 * 16 * 512),
    ),
    "tiny": replace(
        FULL,
        base=Base(seq_length=128, batch_size=2, checkpoint_every=2),
        build=partial(
            build, train=30_000, development=2, held=2, packages=("tqdm",), held_out=("packaging",)
        ),
        arms=(*ARMS, longer(1)),
        unit=2,
        units=1,
        search_units=1,
        warmup_steps=1,
        seeds=(0,),
    ),
}
