"""What is worth storing of a teacher: a bin of the rest, draws of it, or all that it says?

evidence/distributions.md says what is compared and what counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from prove.compare import Records, best_arm, find_missing, read_records
from prove.experiment import Arm
from prove.texts import Document, Texts
from prove.transfer import ELSEWHERE, PLAIN, compare_shares, share_tables
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
    build: Callable[[Path, Sequence[Document]], Texts], data: Path, healing: Sequence[Document]
) -> Texts:
    """Draw transfer's texts by `build`; those to train on stand twice, to be scored in two ways."""
    texts = build(data, healing)
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
        experiment,
        name="distributions",
        build=partial(build_twice, experiment.build),
        aligned=("train", "drawn", "dev"),
        scored={"train": ("--top-k", 16, "--draws", 0), "drawn": ("--top-k", 8, "--draws", 4)},
        arms=ARMS,
        judge=judge,
    )
    for name, experiment in TRANSFER.items()
}
# It shows that the chain works: no whole vocabulary is needed.
SCALES["tiny"] = replace(
    SCALES["tiny"],
    arms=tuple(
        replace(arm, options=(*arm.options[:-1], 64)) if arm.running else arm for arm in ARMS
    ),
)
