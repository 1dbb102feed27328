"""Fresh code again: cells, draws, every arm's own rate, and a weight that falls with the rate.

evidence/fresh.md says what is compared and what counts.
"""

from dataclasses import replace
from math import log
from pathlib import Path

from prove.code import PACKAGES, SETS, texts_of, verdict
from prove.code import SCALES as CODE
from prove.compare import both_overviews, read_records, sums_of, table
from prove.experiment import Arm, Base

HALF = ("--method", "distill", "--weight", 0.5, "--distill-map", "cells")
METHODS = ("cells", "falling")
ARMS = (
    Arm(name="full", options=("--method", "full")),
    Arm(name="cells", options=HALF, scored=True),
    Arm(name="falling", options=HALF, scored=True, program=("falling.py",)),
)


def judge(folder: Path) -> str:
    """Return the tables and the verdict, by the rules of evidence/fresh.md."""
    records = read_records(folder)
    parts = ["# Fresh code again", "", verdict(records, ("full",), METHODS), ""]
    begun = {name: records[name][0] for name in ("start", "original") if name in records}
    rows = []
    for name, record in begun.items():
        sums = [sums_of(record, held_out, "last") for held_out in SETS]
        bits = (sum(own["nats"]) / log(2) / sum(own["bytes"]) for own in sums)
        rows.append([name, *(f"{value:.3f}" for value in bits)])
    parts += ["## Before training", "", table(["model", *SETS], rows)]
    return "\n".join(parts) + both_overviews(records, SETS, "full")


FULL = replace(
    CODE["fresh-all"],
    name="fresh",
    base=Base(batch_size=2, precision="float32"),
    scored={"train": ("--top-k", 8, "--draws", 4)},
    arms=ARMS,
    first_rate=1e-4,
    judge=judge,
)
SCALES = {
    "full": FULL,
    "tiny": replace(
        FULL,
        base=Base(seq_length=128, batch_size=2),
        build=texts_of(PACKAGES, train=6, development=2, held=2),
        unit=1,
        units=2,
        warmup_steps=1,
        seeds=(0,),
    ),
}
