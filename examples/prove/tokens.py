"""Which tokens to learn: the paper's selection on noisy mathematics, one pass over new text.

docs/evidence/tokens.md says what is compared, what counts and what came out. The rate of 8e-4 is
what the searches of that page found for `full`, `teacher` and `alm`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prove.compare import Records, compare, overview, paired, read_records, table
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


@dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
        documents: clean mathematical documents at most.
        trained: of them in the mixtures at most.
        held: documents of each held-out set at most.
        packages: whose docstrings are held out.
    """

    documents: int = 100_000
    trained: int = 1300
    held: int = 120
    packages: tuple[str, ...] = HELD_OUT_PACKAGES


SIZES = {
    "full": Size(),
    "small": Size(documents=2200, trained=500, held=60),
    "tiny": Size(documents=60, held=8, packages=("tqdm",)),
    "gpu": Size(documents=10_000_000, trained=10_000_000, held=500),
}


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


def experiment(scale: str) -> Experiment:
    """Return the experiment at a scale."""
    gpu_layers = (*range(24), 28, 29)
    gpu = Base(layers=gpu_layers, vocab_size=16_384, batch_size=64, heal_rate=5e-4, device="cuda")
    tiny = scale == "tiny"
    wanted = {"tiny": ("full", "teacher-0.4"), "small": (*_COMPARED, *_CONTROL)}
    return Experiment(
        name="tokens",
        scale=scale,
        base={"full": Base(), "small": Base(heal_until=200), "tiny": TINY, "gpu": gpu}[scale],
        build=partial(build, SIZES[scale]),
        aligned=("noisy", "clean", "last", "last-clean", "dev"),
        scored={"noisy": (), "clean": ()},
        arms=tuple(a for a in ARMS if scale not in wanted or a.name in wanted[scale]),
        unit={"gpu": 218, "tiny": 2, "small": 28}.get(scale, 4),
        units={"tiny": 2, "small": 2}.get(scale, 14),
        search_units=1,
        warmup_steps=1 if tiny else 8,
        stages=(Stage(name=AFTER, data="last", steps=2),) if tiny else STAGES,
        seeds=(0,) if tiny else (0, 1, 2),
        judge=judge,
    )


def build(size: Size, data: Path, healing: Sequence[Document]) -> Texts:
    """Divide the mathematics, and spoil it."""
    sets = ("gsm8k", "math", "docstrings")
    pools = read_pools(data, healing, sets, size.packages)
    train = pools.train[: size.documents]
    first = max(1, round(DEV_SHARE * len(train)))
    second = first + max(1, round(LAST_SHARE * len(train)))
    development, last, main = train[:first], train[first:second], train[second:][: size.trained]
    spoiled = with_noise(development, random.Random("held_noise"), start=2 * 10**6)
    held = {f"held_{name}": pools.held[name][: size.held] for name in sets}
    return {
        "noisy": with_noise(main, random.Random("noisy")),
        "clean": main,
        "last": with_noise(last, random.Random("last"), start=10**6),
        "last-clean": last,
        "dev": development,
        **held,
        "held_noise": [document for document in spoiled if document.kind != "clean"],
    }


def judge(folder: Path) -> str:
    """Return the tables and the verdicts, by the rules of docs/evidence/tokens.md."""
    records = read_records(folder)
    parts = ["# Which tokens to learn", "", verdicts(records), "", last_stages(records), ""]
    stages = (AFTER, "last") if all_have(records, AFTER) else ("last",)
    for at in stages:
        parts += [f"## Bits per byte, {at}", "", overview(records, SETS, "full", at)]
    return "\n".join(parts)


def all_have(records: Records, stage: str) -> bool:
    """Say whether every run was measured after a stage."""
    found = [set(r["measured"]) for own in records.values() for r in own.values() if "rate" in r]
    return all(stage in own for own in found)


def last_stages(records: Records) -> str:
    """Return what is left of the differences after last stages, by the rules that were added."""
    own = {name: records.get(name, {}) for name in (*_COMPARED, *_CONTROL)}
    missing = [f"{name} {len(found)} of 3" for name, found in own.items() if len(found) < 3]
    full, random_, teacher = _COMPARED
    after = [stage.name for stage in STAGES if stage.name != AFTER_CLEAN]
    pairs = [(teacher, full), (random_, full), (teacher, random_)]
    shown = [(pair, ["last", *after]) for pair in pairs]
    shown += [((f"clean-{a}", f"clean-{b}"), ["last", AFTER, AFTER_CLEAN]) for a, b in pairs]
    rows = [
        [f"`{a}` less `{b}`", name, at, compare(own[a], own[b], name, at)]
        for (a, b), stages in shown
        for name in ("gsm8k", "math", "docstrings")
        for at in stages
        if len(own[a].keys() & own[b].keys()) == 3
    ]
    lines = [f"Seeds that are there: {', '.join(missing)}."] if missing else []
    for arm, of in ((teacher, "By the rules"), (random_, "The same for `random-0.4`")):
        if min(len(own[arm]), len(own[full])) == 3:
            lines.append(f"{of}: **{_stays(records, arm)}**.")
    if not any(name.startswith("clean") for name in missing):
        moved = [_moved(records, name) for name in MATHEMATICS]
        matters = any(abs(mean) > half for mean, _, half in moved)
        said = ", ".join(f"{mean:+.3f} ± {half:.3f}" for mean, _, half in moved)
        lines.append(f"A clean last stage {'matters' if matters else 'does not matter'}: {said}.")
    if rows:
        lines += ["", table(["runs", "set", "measured", "difference"], rows)]
    return "\n".join(lines)


def _stays(records: Records, arm: str) -> str:
    """Say whether what is left after 56 steps is knowledge or calibration."""
    found = [compare(records[arm], records["full"], n, "after-56") for n in MATHEMATICS]
    above = (min(f.values.values()) > 0 and f.mean > f.half_width for f in found)
    if any(above):
        return "knowledge"
    return "calibration" if all(f.mean <= f.half_width for f in found) else "undecided"


def _moved(records: Records, name: str) -> tuple[float, float, float]:
    """Return how far a clean last stage moves the clean `teacher` less `full`, and its interval."""
    own, plain = (records[f"clean-{arm}"] for arm in ("teacher-0.4", "full"))
    noisy, clean = (compare(own, plain, name, at).values for at in (AFTER, AFTER_CLEAN))
    return paired(clean[seed] - noisy[seed] for seed in noisy)


def verdicts(records: Records) -> str:
    """Return which rules hold; intervals are Student's t over seeds, and documents drawn again."""
    needed = {"full", "random-0.4", "teacher-0.4", "clean-full", "clean-teacher-0.4"}
    needed |= {"teacher-0.6", "teacher_loss-0.4", "full-equal-scored"}
    missing = needed - records.keys()
    if missing:
        return f"The rules of the whole table also need {', '.join(sorted(missing))}."

    def less(own: str, other: str, name: str) -> float:
        return compare(records[own], records[other], name, AFTER).mean

    def beats(other: str) -> bool:
        own = records["teacher-0.4"]
        found = [compare(own, records[other], name, AFTER) for name in MATHEMATICS]
        return all(difference.is_below_zero for difference in found)

    shrinks = all(
        less("clean-teacher-0.4", "clean-full", name) > less("teacher-0.4", "full", name)
        for name in MATHEMATICS
    )
    sets = (*MATHEMATICS, "docstrings")
    plain = all(less("full", f"teacher-{k}", n) <= 0 for k in (0.4, 0.6) for n in sets)
    chance = any(less("random-0.4", "teacher-0.4", name) <= 0 for name in MATHEMATICS)
    taste = all(less("teacher_loss-0.4", "teacher-0.4", name) <= 0 for name in MATHEMATICS)
    found = {
        "for the method": beats("full") and beats("random-0.4") and shrinks,
        "against the method": plain or chance,
        "against the difference": taste,
        "worth its teacher": beats("full-equal-scored"),
    }
    return ", ".join(f"**{rule}** {'yes' if holds else 'no'}" for rule, holds in found.items())
