"""A model for one code base: is a far better teacher of another family worth more than more passes?

evidence/code.md says what is compared and what counts.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from docstring_corpus import find_sources

from prove.compare import Records, best_arm, both_overviews, compare, find_missing, read_records
from prove.experiment import Arm, Base, Experiment
from prove.filter import by_teacher
from prove.texts import Document, Texts, healing_texts, read_questions, without_overlap

SEED = 23
PACKAGES = ("distributed", "lm_eval", "numba")
"""A draw each."""
OTHERS = ("accelerate", "dask", "datasets", "networkx")
CHARACTERS = 1500
RATE = 1e-4
PLAIN = ("full", "full-decay", "full-dropout", "full-kept")
METHODS = ("teacher-0.7", "distill", "distill-plain", "drawn", "drawn-plain", "distill-kept")
SETS = ("package", "others", "docstrings", "gsm8k")


def _distill(name: str, weight: float, data: str, order: int) -> Arm:
    options = ("--method", "distill", "--weight", weight)
    return Arm(name=name, options=options, data=data, scored=True, rate=RATE, order=order)


def _teacher(keep: float, order: int = 0) -> Arm:
    options = ("--method", "teacher", "--keep-fraction", keep)
    return Arm(name=f"teacher-{keep}", options=options, scored=True, rate=RATE, order=order)


_FULL = Arm(name="full", options=("--method", "full"), rate=RATE)
ARMS = (
    _FULL,
    _distill("distill-plain", 0.5, "train", 0),
    _distill("distill", 0.8, "train", 1),
    _distill("drawn-plain", 0.5, "drawn", 1),
    _distill("drawn", 0.8, "drawn", 1),
    replace(_FULL, name="full-decay", options=("--method", "full", "--weight-decay", 1), order=2),
    replace(_FULL, name="full-dropout", program=("dropout.py", 0.1), order=2),
    _teacher(0.7, 2),
    replace(_FULL, name="full-kept", where=by_teacher, order=3),
    replace(_distill("distill-kept", 0.5, "train", 3), where=by_teacher),
)
FRESH_ARMS = (_FULL, _teacher(0.7), _teacher(0.85), _distill("distill-plain", 0.5, "train", 0))


def build(
    data: Path,
    healing: Sequence[Document],
    *,
    packages: Sequence[str],
    train: int,
    development: int,
    held: int,
) -> Texts:
    """Draw windows of sources, no two from one file.

    Args:
        data: folder of GSM8K.
        healing: not used; no student is healed.
        packages: what is trained on.
        train: windows.
        development: further windows of the same packages.
        held: documents of each held-out set.
    """
    own = source_windows(packages)
    found = {"package": own[train + development :], "others": source_windows(OTHERS)}
    found["docstrings"] = healing_texts(OTHERS)
    found["gsm8k"] = read_questions(data, "gsm8k")
    texts = {"train": own[:train], "dev": own[train : train + development]}
    for name in SETS:
        left = without_overlap(found[name], [*texts["train"], *texts["dev"]])
        texts[f"held_{name}"] = left[:held]
    return texts | {"drawn": texts["train"]}


def source_windows(packages: Sequence[str]) -> list[Document]:
    """Return one window of whole lines of each source file that is long enough, shuffled."""
    order = random.Random(SEED)
    windows = []
    for package in packages:
        for number, path in enumerate(sorted(find_sources(package).rglob("*.py"))):
            text = path.read_text("utf-8", "ignore")
            if len(text) >= 2 * CHARACTERS:
                start = text.index("\n", order.randrange(len(text) - CHARACTERS - 200))
                window = text[start + 1 : start + 1 + CHARACTERS].rpartition("\n")[0]
                windows.append(Document("clean", package, number, window))
    order.shuffle(windows)
    return windows


def read_draws(folders: Sequence[Path]) -> Records:
    """Return the records of several draws as one: a draw stands for a seed, or has some."""
    found: Records = {}
    for draw, folder in enumerate(sorted(folders)):
        for arm, records in read_records(folder).items():
            numbered = {len(PACKAGES) * draw + seed: record for seed, record in records.items()}
            found.setdefault(arm, {}).update(numbered)
    return found


def judge(folder: Path, plain: Sequence[str] = PLAIN, methods: Sequence[str] = METHODS) -> str:
    """Return the tables and the verdict of all draws, by the rules of evidence/code.md."""
    own = folder.parent.name.rpartition("-")[0]  # code-small-PACKAGE
    return judge_draws([*folder.parents[1].glob(f"{own}-*/records")], plain, methods)


def judge_draws(
    folders: Sequence[Path], plain: Sequence[str] = PLAIN, methods: Sequence[str] = METHODS
) -> str:
    """Return what `judge` says of the records in these folders, one for each draw."""
    records = read_draws(folders)
    tables = both_overviews(records, SETS, "full")
    return f"# One code base\n\n{verdict(records, plain, methods)}\n{tables}"


def verdict(
    records: Records,
    plain: Sequence[str],
    methods: Sequence[str],
    sets: Sequence[str] = SETS,
) -> str:
    """Return what the rules say, or which runs are missing; the first set decides."""
    if missing := find_missing(records, (*plain, *methods), len(PACKAGES)):
        return f"Not finished: {missing}."
    best = best_arm(records, plain)
    lines = [f"The best plain arm is `{best}`. Less it, bits per byte:", ""]
    for arm in methods:
        found = compare(records, arm, best, sets[0])
        rule = "for" if found.is_below_zero else "against" if found.mean >= 0 else "undecided"
        rest = ", ".join(f"{name} {compare(records, arm, best, name)}" for name in sets[1:])
        lines.append(f"- `{arm}`: {sets[0]} {found}: **{rule}**; {rest}")
    return "\n".join(lines)


def texts_of(
    packages: Sequence[str], *, train: int = 20, development: int = 8, held: int = 20
) -> partial[Texts]:
    """Return `build` of these packages."""
    return partial(build, packages=packages, train=train, development=development, held=held)


_SMALL = Experiment(
    name="code",
    base=Base(batch_size=2),
    build=texts_of(()),
    aligned=("train", "drawn", "dev"),
    scored={"train": ("--top-k", 16, "--draws", 0), "drawn": ("--top-k", 8, "--draws", 4)},
    arms=ARMS,
    units=8,
    search_units=1,
    measured=None,
    seeds=(0,),
    other_teacher=True,
    judge=judge,
)
_FRESH = replace(
    _SMALL,
    build=texts_of(PACKAGES, train=100),
    aligned=("train", "dev"),
    scored={"train": ("--top-k", 16, "--draws", 0)},
    arms=FRESH_ARMS,
    unit=20,
    units=2,
    seeds=(0, 1, 2),
    judge=partial(judge, plain=("full",), methods=[arm.name for arm in FRESH_ARMS[1:]]),
)
SCALES = {
    **{f"small-{package}": replace(_SMALL, build=texts_of([package])) for package in PACKAGES},
    "fresh-all": _FRESH,
    "tiny-all": replace(
        _SMALL,
        base=Base(seq_length=128, batch_size=2),
        build=texts_of(PACKAGES, train=6, development=2, held=2),
        arms=ARMS[:2],
        units=1,
    ),
}
