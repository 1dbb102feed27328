"""Which tokens to learn: the paper's selection on noisy mathematics, one pass over new text.

evidence/tokens.md says what is compared, what counts and what came out. The rate of 8e-4 is
what the searches of that page found for `full`, `teacher` and `alm`.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prove.compare import (
    Difference,
    Records,
    common_seeds,
    compare,
    difference_of,
    find_missing,
    nats_less,
    overview,
    read_records,
    sums_of,
    table,
)
from prove.experiment import TINY, Arm, Base, Experiment, Stage
from prove.texts import HELD_OUT_PACKAGES, Document, Texts, read_pools, with_noise

RATE = 8e-4
# Of the mathematics: what the last stage reads, and what rates were searched on.
LAST_SHARE, DEV_SHARE = 0.15, 0.03
SELECTORS = ("random", "teacher", "teacher_loss", "student_loss", "student_entropy")
NEED_LOSSES = ("teacher", "teacher_loss", "alm")
MATHEMATICS = ("gsm8k", "math")
SETS = ("gsm8k", "math", "docstrings", "noise")
AFTER, AFTER_CLEAN = "after-14", "after-14-clean"


def _arm(method: str, data: str, *, keep: float | None = None, **more: object) -> Arm:
    share = () if keep is None else ("--keep-fraction", keep)
    name = method if keep is None else f"{method}-{keep}"
    return Arm(
        name=f"{more.pop('name', name)}" if data == "noisy" else f"clean-{name}",
        options=("--method", method, *share),
        data=data,
        scored=method in NEED_LOSSES,
        rate=RATE,
        **more,  # type: ignore[arg-type]
    )


ARMS = (
    *(_arm(method, "noisy") for method in ("full", "alm")),
    *(_arm(method, "noisy", keep=0.4) for method in SELECTORS),
    *(_arm(method, "clean", keep=0.4, order=1) for method in ("random", "teacher")),
    _arm("full", "clean", order=1),
    *(_arm(method, "noisy", keep=0.6, seeds=(0,), order=2) for method in SELECTORS),
    _arm("alm", "noisy", keep=0.4, seeds=(0,), order=2),
    # In units of four steps: what `teacher` computes at k = 0.4 pays for, with scoring and without.
    _arm("full", "noisy", name="full-equal-scored", units=34, order=3),
    _arm("full", "noisy", name="full-equal-student", units=13, seeds=(0,), order=3),
)
_COMPARED = ("full", "random-0.4", "teacher-0.4")
_CONTROL = ("clean-full", "clean-random-0.4", "clean-teacher-0.4")
STAGES = (
    Stage(name=AFTER, data="last", steps=14),
    Stage(name="after-28", data="last", steps=28, arms=_COMPARED),
    Stage(name="after-56", data="last", steps=56, arms=_COMPARED),
    Stage(name=AFTER_CLEAN, data="last-clean", steps=14, arms=_CONTROL),
)


def build(
    data: Path,
    healing: Sequence[Document],
    *,
    held: Mapping[str, int],
    documents: int | None = None,
    trained: int | None = 1300,
    packages: Sequence[str] = HELD_OUT_PACKAGES,
) -> Texts:
    """Divide the mathematics, and spoil it.

    Args:
        data: folder of the sets.
        healing: what the student has read before.
        held: documents at most of each held-out set.
        documents: clean mathematical documents at most.
        trained: of them in the mixtures at most.
        packages: whose docstrings are held out.
    """
    pool, sets = read_pools(data, healing, held, packages)
    train = pool[:documents]
    first = max(1, round(DEV_SHARE * len(train)))
    second = first + max(1, round(LAST_SHARE * len(train)))
    development, last, main = train[:first], train[first:second], train[second:][:trained]
    spoiled = with_noise(development, random.Random("held_noise"), start=2 * 10**6)
    return {
        "noisy": with_noise(main, random.Random("noisy")),
        "clean": main,
        "last": with_noise(last, random.Random("last"), start=10**6),
        "last-clean": last,
        "dev": development,
        **sets,
        "held_noise": [document for document in spoiled if document.kind != "clean"],
    }


def judge(folder: Path) -> str:
    """Return the tables and the verdicts, by the rules of evidence/tokens.md."""
    records = read_records(folder)
    parts = [f"# Which tokens to learn\n\n{verdicts(records)}\n\n{last_stages(records)}\n"]
    runs = [record["measured"] for own in records.values() for record in own.values()]
    if all(AFTER in measured or "0" in measured for measured in runs):
        parts.append(overview(records, SETS, "full", AFTER, AFTER))
    return "".join([*parts, overview(records, SETS, "full", "last", "before the last stage")])


def last_stages(records: Records) -> str:
    """Return what is left of the differences after last stages, by the rules that were added."""
    missing = find_missing(records, (*_COMPARED, *_CONTROL))
    there = {arm for arm, own in records.items() if len(own) == 3}
    full, random_, teacher = _COMPARED
    pairs = [(teacher, full), (random_, full), (teacher, random_)]
    after = [stage.name for stage in STAGES if stage.name != AFTER_CLEAN]
    shown = [(pair, ["last", *after]) for pair in pairs]
    shown += [((f"clean-{a}", f"clean-{b}"), ["last", AFTER, AFTER_CLEAN]) for a, b in pairs]
    rows = [
        [f"`{a}` less `{b}`", name, at, compare(records, a, b, name, at)]
        for (a, b), stages in shown
        for name in (*MATHEMATICS, "docstrings")
        for at in stages
        if {a, b} <= there
    ]
    lines = [f"Seeds that are there: {missing}."] if missing else []
    for arm, of in ((teacher, "By the rules"), (random_, "The same for `random-0.4`")):
        if {arm, full} <= there:
            lines.append(f"{of}: **{_stays(records, arm)}**.")
    if there >= set(_CONTROL):
        moved = [_moved(records, name) for name in MATHEMATICS]
        matters = any(abs(found.mean) > found.half_width for found in moved)
        said = ", ".join(map(str, moved))
        lines.append(f"A clean last stage {'matters' if matters else 'does not matter'}: {said}.")
    if rows:
        lines += ["", table(["runs", "set", "measured", "difference"], rows)]
    return "\n".join(lines)


def _stays(records: Records, arm: str) -> str:
    """Say whether what is left after 56 steps is knowledge or calibration."""
    found = [compare(records, arm, "full", name, "after-56") for name in MATHEMATICS]
    if any(min(f.values.values()) > 0 and f.mean > f.half_width for f in found):
        return "knowledge"
    return "calibration" if all(f.mean <= f.half_width for f in found) else "undecided"


def _moved(records: Records, name: str) -> Difference:
    """Return how far a clean last stage moves the clean `teacher` less `full`."""
    own, other = "clean-teacher-0.4", "clean-full"
    noisy, clean = (nats_less(records, own, other, name, at) for at in (AFTER, AFTER_CLEAN))
    num_bytes = sums_of(next(iter(records[own].values())), name, AFTER)["bytes"]
    wholes = math.log(2) * np.array(num_bytes)
    return difference_of(common_seeds(records, own, other), [(clean - noisy, wholes)])


def verdicts(records: Records) -> str:
    """Return which rules hold; intervals are Student's t over seeds, and documents drawn again."""
    needed = {"full", "random-0.4", "teacher-0.4", "clean-full", "clean-teacher-0.4"}
    needed |= {"teacher-0.6", "teacher_loss-0.4", "full-equal-scored"}
    if missing := needed - records.keys():
        return f"The rules of the whole table also need {', '.join(sorted(missing))}."

    def less(own: str, other: str, name: str) -> float:
        return compare(records, own, other, name, AFTER).mean

    def beats(other: str) -> bool:
        found = [compare(records, "teacher-0.4", other, name, AFTER) for name in MATHEMATICS]
        return all(difference.is_below_zero for difference in found)

    shrinks = all(
        less("clean-teacher-0.4", "clean-full", name) > less("teacher-0.4", "full", name)
        for name in MATHEMATICS
    )
    sets = (*MATHEMATICS, "docstrings")
    plain = all(less("full", f"teacher-{k}", n) <= 0 for k in (0.4, 0.6) for n in sets)
    chance = any(less("random-0.4", "teacher-0.4", name) <= 0 for name in MATHEMATICS)
    found = {
        "for the method": beats("full") and beats("random-0.4") and shrinks,
        "against the method": plain or chance,
        "against the difference": all(
            less("teacher_loss-0.4", "teacher-0.4", name) <= 0 for name in MATHEMATICS
        ),
        "worth its teacher": beats("full-equal-scored"),
    }
    return ", ".join(f"**{rule}** {'yes' if holds else 'no'}" for rule, holds in found.items())


def held(count: int) -> dict[str, int]:
    """Return a number of documents for each set."""
    return dict.fromkeys((*MATHEMATICS, "docstrings"), count)


_GPU_BASE = Base(
    layers=(*range(24), 28, 29), vocab_size=16_384, batch_size=64, heal_rate=5e-4, device="cuda"
)
TINY_TEXTS: dict[str, Any] = {"held": held(8), "documents": 60, "packages": ("tqdm",)}
FULL = Experiment(
    name="tokens",
    build=partial(build, held=held(120)),
    aligned=("noisy", "clean", "last", "last-clean", "dev"),
    scored={"noisy": (), "clean": ()},
    arms=ARMS,
    unit=4,
    units=14,
    search_units=1,
    warmup_steps=8,
    stages=STAGES,
    judge=judge,
)
SCALES = {
    "full": FULL,
    "small": replace(
        FULL,
        base=Base(heal_until=200),
        build=partial(build, held=held(60), documents=2200, trained=500),
        arms=tuple(arm for arm in ARMS if arm.name in (*_COMPARED, *_CONTROL)),
        unit=28,
        units=2,
    ),
    "tiny": replace(
        FULL,
        base=TINY,
        build=partial(build, **TINY_TEXTS),
        arms=tuple(arm for arm in ARMS if arm.name in ("full", "teacher-0.4")),
        unit=2,
        units=2,
        warmup_steps=1,
        stages=(Stage(name=AFTER, data="last", steps=2),),
        seeds=(0,),
    ),
    "gpu": replace(
        FULL, base=_GPU_BASE, build=partial(build, held=held(500), trained=None), unit=218
    ),
}
