"""Cells or the longest prefix: which mapping teaches a transplanted model better?

evidence/cells.md says what is compared and what counts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from prove.code import OTHERS, source_windows
from prove.compare import (
    Difference,
    Records,
    common_seeds,
    difference_of,
    find_missing,
    paired,
    read_records,
    sums_of,
    table,
)
from prove.experiment import TINY, Arm, Base, Experiment
from prove.numerals import KINDS, beginning
from prove.texts import HELD_OUT_PACKAGES, Document, Texts, read_pools, without_overlap
from prove.transfer import (
    DOMAIN,
    ELSEWHERE,
    PLAIN,
    SETS,
    compare_shares,
    draw_texts,
    share_tables,
)

PROMPTS = ("prompts_mathematics", "prompts_code")
LONGEST_PROMPTED = 360
"""Characters of the texts whose beginnings are prompts."""
HALF = ("--method", "distill", "--weight", 0.5, "--distill-map")
ARMS = (
    Arm(name=PLAIN, options=("--method", "full")),
    Arm(name="prefix", options=(*HALF, "prefix"), scored=True),
    Arm(name="cells", options=(*HALF, "cells"), scored=True),
)


def build(
    data: Path,
    healing: Sequence[Document],
    *,
    train: int,
    development: int,
    held: int,
    prompts: int,
    packages: Sequence[str] = HELD_OUT_PACKAGES,
) -> Texts:
    """Draw transfer's texts, and beginnings of others that students go on with.

    Args:
        data: folder of the sets.
        healing: docstrings that no held-out text may share anything with.
        train: documents to train on.
        development: further documents.
        held: documents of each held-out set.
        prompts: of mathematics, and of code.
        packages: whose docstrings are held out.
    """
    # Held-out problems that aren't measured are gone on with.
    pool, sets = read_pools(data, healing, dict.fromkeys(SETS, 10**6), packages)
    texts = draw_texts(pool, train, development)
    texts |= {name: documents[:held] for name, documents in sets.items()}
    left = [document for name in DOMAIN for document in sets[f"held_{name}"][held:]]
    short = [document for document in left if len(document.text) <= LONGEST_PROMPTED]
    short.sort(key=lambda document: document.number)
    windows = without_overlap(source_windows(OTHERS), texts["train"])
    cut = [replace(own, text=own.text[:LONGEST_PROMPTED]) for own in windows]
    for name, documents, at in zip(PROMPTS, (short, cut), (" ", "\n"), strict=True):
        begun = [replace(own, text=beginning(own.text, 0.6, at=at)) for own in documents]
        texts[name] = [own for own in begun if own.text.strip()][:prompts]
    return texts


def judge(folder: Path) -> str:
    """Return the tables and the verdict, by the rules of evidence/cells.md."""
    records = read_records(folder)
    parts = ["# Cells against prefixes", "", verdict(records), ""]
    if PLAIN in records:
        parts += ["## Numbers and indents", "", number_table(records)]
    return "\n".join([*parts, share_tables(records)])


def verdict(records: Records, num_seeds: int = 3) -> str:
    """Return what the rules say, or which runs are missing."""
    if missing := find_missing(records, [arm.name for arm in ARMS], num_seeds):
        return f"Not finished: {missing}."
    lines, found = [], {}
    for own, other in (("cells", "prefix"), ("cells", PLAIN), ("prefix", PLAIN)):
        places = {"in the domain": DOMAIN, "elsewhere": ELSEWHERE}
        less = {name: compare_shares(records, own, other, sets) for name, sets in places.items()}
        found[own, other] = list(less.values())
        said = ", ".join(f"{name} {difference}" for name, difference in less.items())
        packed = packed_bits(records, own, other)
        said += f"; bits per byte of packed numbers {packed}" if packed else ""
        lines.append(f"- `{own}` less `{other}`, share that came back: {said}")
    rule = rule_of(found["cells", "prefix"])
    helps = "helps" if found["cells", PLAIN][1].is_above_zero else "isn't shown to help"
    lines += ["", f"By the rules: **{rule}**. Against plain training elsewhere it {helps}."]
    return "\n".join(lines)


def rule_of(found: Sequence[Difference]) -> str:
    """Return what cells less prefixes in the domain and elsewhere mean."""
    wins = any(own.is_above_zero for own in found)
    if wins and not any(own.is_below_zero for own in found):
        return "for cells"
    return "against cells" if all(own.mean <= 0 for own in found) else "undecided"


def packed_bits(records: Records, own: str, other: str) -> Difference | None:
    """Return how many bits per byte of packed numbers one arm needs less another, in all sets.

    None where a tokenizer packs no digits.
    """
    seeds = common_seeds(records, own, other)
    ours, theirs = (_numbers(records, arm, seeds) for arm in (own, other))
    if not ours[..., 1].any():
        return None
    return difference_of(seeds, [(ours[..., 2] - theirs[..., 2], math.log(2) * ours[0, :, 1])])


def _numbers(records: Records, arm: str, seeds: Sequence[int]) -> NDArray[np.float64]:
    """Return sums over packed numbers of every document of all sets, [seeds, documents, 6]."""
    runs = [[sums_of(records[arm][seed], name, "last") for name in SETS] for seed in seeds]
    return np.array([[row for sums in run for row in sums["numbers"]] for run in runs])


def odd_shares(records: Records, arm: str, kind: str) -> dict[int, float]:
    """Return by seed the share of numbers or indents that the student's tokenizer splits elsewhere.

    Seeds that wrote nothing of that kind are left out.
    """
    found: dict[int, float] = {}
    for seed, run in records[arm].items():
        counts = [own[kind] for name in PROMPTS for own in sums_of(run, name, "last")["odd"]]
        written, odd = np.sum(counts, 0).tolist()
        found |= {seed: odd / written} if written else {}
    return found


def number_table(records: Records) -> str:
    """Return by arm how numbers and indents are written, and what packed numbers cost."""
    heads = ["arm", *(f"odd {kind}" for kind in KINDS), "bits per byte of packed numbers"]
    heads += ["expected there: packed", "one digit", "a lone space"]
    rows = []
    for arm in records:
        cells: list[object] = [f"`{arm}`"]
        for kind in KINDS:
            mean, half = (100 * value for value in paired(odd_shares(records, arm, kind).values()))
            shown = f"{mean:.1f} %" + ("" if math.isnan(half) else f" ± {half:.1f}")
            cells.append("–" if math.isnan(mean) else shown)
        sums = _numbers(records, arm, sorted(records[arm])).sum(1)
        if sums[:, 1].all():
            cells.append(f"{fmean(sums[:, 2] / sums[:, 1]) / math.log(2):.3f}")
            cells += [f"{fmean(sums[:, place] / sums[:, 0]):.3f}" for place in (3, 4, 5)]
        else:
            cells += ["–"] * 4
        rows.append(cells)
    return table(heads, rows)


_SMALL = Experiment(
    name="cells",
    base=Base(batch_size=1, precision="float32"),
    build=partial(build, train=150, development=12, held=20, prompts=100),
    aligned=("train", "dev"),
    scored={"train": ("--top-k", 8, "--draws", 4)},
    arms=ARMS,
    unit=16,
    units=2,
    search_units=1,
    first_rate=4e-4,
    warmup_steps=4,
    measured=(2,),
    prompts=PROMPTS,
    numbers=True,
    judge=judge,
)
SCALES = {
    # Of a vocabulary each, which TOKENIZER gives; folders and records are apart.
    "gpt_neox": _SMALL,
    "llama2": _SMALL,
    "tiny": replace(
        _SMALL,
        base=TINY,
        build=partial(build, train=40, development=4, held=4, prompts=4, packages=("tqdm",)),
        unit=2,
        units=1,
        warmup_steps=1,
        measured=(1,),
        seeds=(0,),
    ),
}
