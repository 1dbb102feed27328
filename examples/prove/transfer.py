"""Another tokenizer for a model: which training brings back most where it was never trained?

docs/evidence/transfer.md says what is compared and what counts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from prove.compare import Records, best_arm, bits_per_byte, paired, read_records, table
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
# Half as many steps again: more than scoring costs of what a run reads.
LONGER = replace(ARMS[0], name="plain-longer", rate=PLAIN, order=1)


@dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
        train: documents to train on.
        development: further documents.
        held: documents of each held-out set.
        packages: whose docstrings are held out.
    """

    train: int = 700
    development: int = 40
    held: int = 60
    packages: tuple[str, ...] = HELD_OUT_PACKAGES


SIZES = {
    "full": Size(),
    "small": Size(300, 20, 30),
    "tiny": Size(40, 4, 4, ("tqdm",)),
    "gpu": Size(5000, 200, 500),
}
STEPS = {"full": (50, (1, 2, 4)), "small": (20, (1, 2)), "tiny": (2, (1,)), "gpu": (50, (1, 2, 4))}
"""Steps of a unit, and after which units is measured, the last of which ends a run."""


def experiment(scale: str, tokenizer: Path) -> Experiment:
    """Return the experiment at a scale.

    Args:
        scale: tiny, small, full or gpu.
        tokenizer: of the new vocabulary, with Llama 2's 32,000 tokens.
    """
    tiny, (unit, measured) = scale == "tiny", STEPS[scale]
    longer = replace(LONGER, units=3 * measured[-1] // 2)
    bases = {
        "full": Base(),
        "small": Base(batch_size=2),
        "tiny": TINY,
        "gpu": Base(device="cuda", batch_size=32),
    }
    return Experiment(
        name="transfer",
        scale=scale,
        base=bases[scale],
        build=partial(build, SIZES[scale]),
        aligned=("train", "dev"),
        scored={"train": ("--top-k", 16)},
        arms=ARMS[:2] if tiny else (*ARMS, longer),
        unit=unit,
        units=measured[-1],
        search_units=1,
        first_rate=2e-4,
        warmup_steps=1 if tiny else 10,
        measured=measured,
        seeds=(0,) if tiny else (0, 1, 2),
        tokenizer=tokenizer.resolve(),
        judge=judge,
    )


def build(size: Size, data: Path, healing: Sequence[Document]) -> Texts:
    """Draw all texts."""
    pools = read_pools(data, healing, SETS, size.packages)
    train = list(pools.train)
    random.Random(SEED).shuffle(train)
    held = {f"held_{name}": pools.held[name][: size.held] for name in SETS}
    return {
        "train": train[: size.train],
        "dev": train[size.train : size.train + size.development],
        **held,
    }


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


def means(records: Records, arms: Sequence[str]) -> str:
    """Return every arm's mean shares, and in parentheses its differences to plain training."""
    plain, rows = shares(records, PLAIN), []
    for arm in arms:
        own = shares(records, arm)
        cells: list[object] = [f"`{arm}`", f"{next(iter(records[arm].values()))['rate']:g}"]
        for name in (*SETS, "elsewhere"):
            mean, _, half = paired(own[s][name] - plain[s][name] for s in own.keys() & plain.keys())
            less = "" if arm == PLAIN else f" ({mean:+.3f} ± {half:.3f})"
            cells.append(f"{fmean(values[name] for values in own.values()):.3f}{less}")
        rows.append(cells)
    return table(["arm", "rate", *SETS, "elsewhere"], rows)


def judge(folder: Path) -> str:
    """Return the tables and the verdict, by the rules of docs/evidence/transfer.md."""
    records = read_records(folder)
    arms = sorted(records.keys() - {"original", "start"})
    rows = [
        [f"`{arm}`", seed, *(f"{100 * own[name]:.1f} %" for name in SETS)]
        for arm in arms
        for seed, own in shares(records, arm).items()
    ]
    parts = ["# Another tokenizer", "", verdict(records), ""]
    parts += ["## Share of the lost bits per byte that came back", ""]
    if PLAIN in arms:
        parts += [means(records, arms), "Run by run:", ""]
    return "\n".join([*parts, table(["arm", "seed", *SETS], rows)])


def verdict(records: Records, num_seeds: int = 3) -> str:
    """Return what the rules say, or which runs are missing."""
    missing = [a for a in (PLAIN, *DISTILL) if len(records.get(a, {})) < num_seeds]
    if missing:
        return f"Not finished: {', '.join(missing)}."
    best = best_arm(records, DISTILL)
    own, plain = shares(records, best), shares(records, PLAIN)
    gains = [own[seed]["elsewhere"] - plain[seed]["elsewhere"] for seed in plain]
    mean, _, half = paired(gains)
    wins = min(gains) > 0 and mean - half > 0
    rule = "for distributions" if wins else "against" if mean <= 0 else "undecided"
    return f"`{best}` less plain elsewhere: {mean:+.3f} ± {half:.3f}. By the rules: **{rule}**."
