"""What is worth storing of a teacher: a bin of the rest, draws of it, or all that it says?

evidence/distributions.md says what is compared and what counts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from prove.compare import Records, best_arm, find_missing, read_records
from prove.experiment import TINY, Arm
from prove.texts import HELD_OUT_PACKAGES, Document, Texts
from prove.transfer import ELSEWHERE, PLAIN, build, compare_shares, share_tables
from prove.transfer import SCALES as TRANSFER

BINNED, DRAWN = ("binned", "binned-plain"), ("drawn", "drawn-plain")
WHOLE = ("whole", "whole-plain")
KINDS = {"a bin": BINNED, "draws": DRAWN, "all": WHOLE}
ALONE = ("--method", "distill", "--weight", 1.0)
HALF = ("--method", "distill", "--weight", 0.5)
VOCABULARY = 49152
ALL = ("--top-k", VOCABULARY)
# Rates are those that transfer has found for the same losses.
ARMS = (
    Arm(name=PLAIN, options=("--method", "full"), rate=4e-4),
    Arm(name="binned", options=ALONE, scored=True, rate=2e-4),
    Arm(name="binned-plain", options=HALF, scored=True, rate=4e-4),
    Arm(name="drawn", options=ALONE, data="drawn", scored=True, rate=2e-4),
    Arm(name="drawn-plain", options=HALF, data="drawn", scored=True, rate=4e-4),
    Arm(name="whole", options=(*ALONE, *ALL), running=True, rate=2e-4, order=1),
    Arm(name="whole-plain", options=(*HALF, *ALL), running=True, rate=4e-4, order=1),
)


def build_twice(
    data: Path,
    healing: Sequence[Document],
    *,
    train: int,
    development: int,
    held: int,
    packages: Sequence[str] = HELD_OUT_PACKAGES,
) -> Texts:
    """Draw transfer's texts; those to train on stand twice, to be scored in two ways.

    Args:
        data: folder of the sets.
        healing: docstrings that no held-out text may share anything with.
        train: documents to train on.
        development: further documents.
        held: documents of each held-out set.
        packages: whose docstrings are held out.
    """
    texts = build(data, healing, train=train, development=development, held=held, packages=packages)
    return {**texts, "drawn": texts["train"]}


def judge(folder: Path) -> str:
    """Return the tables and the verdicts, by the rules of evidence/distributions.md."""
    records = read_records(folder)
    parts = ["# What is worth storing of a teacher", "", verdict(records), ""]
    return "\n".join([*parts, share_tables(records)])


def verdict(records: Records, num_seeds: int = 3) -> str:
    """Return what the rules say, or which runs are missing."""
    if missing := find_missing(records, (PLAIN, *BINNED, *DRAWN), num_seeds):
        return f"Not finished: {missing}."
    own, other = best_arm(records, DRAWN), best_arm(records, BINNED)
    found = compare_shares(records, own, other, ELSEWHERE)
    rule = "draws" if found.is_above_zero else "a bin" if found.mean <= 0 else "undecided"
    lines = [f"`{own}` less `{other}` elsewhere: {found}. By the rules: **{rule}**."]
    for name, arms in KINDS.items():
        if not find_missing(records, arms, num_seeds):
            arm = best_arm(records, arms)
            found = compare_shares(records, arm, PLAIN, ELSEWHERE)
            rule = "for distributions" if found.is_above_zero else "not for distributions"
            lines.append(f"With {name}, `{arm}` less plain elsewhere: {found}: **{rule}**.")
    return "\n\n".join(lines)


SCALES = {
    name: replace(
        TRANSFER[name],
        name="distributions",
        build=partial(build_twice, **TRANSFER[name].build.keywords),  # type: ignore[attr-defined]
        aligned=("train", "drawn", "dev"),
        scored={"train": ("--top-k", 16), "drawn": ("--top-k", 8, "--draws", 4)},
        arms=ARMS,
        judge=judge,
    )
    for name in ("full", "small", "gpu")
}
SCALES["tiny"] = replace(
    SCALES["small"],
    base=TINY,
    build=partial(build_twice, train=40, development=4, held=4, packages=("tqdm",)),
    arms=tuple(
        replace(arm, options=(*arm.options[:-1], 64)) if arm.running else arm for arm in ARMS
    ),
    unit=2,
    units=1,
    warmup_steps=1,
    measured=(1,),
    seeds=(0,),
)
