"""A filtered corpus: can a teacher's stored losses choose whole documents?

evidence/filter.md says what is compared and what counts.
"""

import json
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet

from prove import tokens
from prove.compare import (
    Difference,
    Records,
    best_arm,
    both_overviews,
    compare,
    find_missing,
    read_records,
)
from prove.experiment import TINY, Arm, Base, Experiment
from prove.texts import Document, Texts, read_texts

SEED = 21
SHARE = 0.65
DECIDING = ("gsm8k", "math")
SETS = (*DECIDING, "docstrings")
FILTERS = ("teacher", "difference")
BASELINES = ("random", "zlib")


def ranks(sizes: Mapping[str, int], values: Mapping[str, float]) -> dict[str, float]:
    """Return by document the share of all bytes in documents whose value is at most as large.

    Example:
        >>> ranks({"a": 1, "b": 3}, {"a": 0.5, "b": 0.1})
        {'b': 0.75, 'a': 1.0}
    """
    total, read, found = sum(sizes.values()), 0, {}
    for name in sorted(sizes, key=lambda name: (values[name], name)):
        read += sizes[name]
        found[name] = read / total
    return found


def _among(
    folder: Path, low: float, high: float, values: Callable[[dict[str, str]], dict[str, float]]
) -> str:
    """Return the condition for documents whose rank by a value lies above `low`, up to `high`."""
    texts = read_texts(folder / "text" / "train.jsonl")
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    found = ranks(sizes, values(texts))
    # Ids are KIND:SOURCE:NUMBER, without quotes of their own.
    names = sorted(name for name, share in found.items() if low < share <= high)
    return f"document_id in ({', '.join(map(repr, names))})"


def by_chance(folder: Path) -> str:
    """Return a condition for 65 % of the bytes by chance."""
    order = random.Random(SEED)
    return _among(folder, 0, SHARE, lambda texts: {name: order.random() for name in sorted(texts)})


def by_zlib(folder: Path) -> str:
    """Return the condition for documents that compress neither best nor worst."""

    def ratios(texts: dict[str, str]) -> dict[str, float]:
        data = {name: text.encode() for name, text in texts.items()}
        return {name: len(zlib.compress(text, 9)) / len(text) for name, text in data.items()}

    tail = (1 - SHARE) / 2
    return _among(folder, tail, 1 - tail, ratios)


def teacher_bits(folder: Path) -> dict[str, float]:
    """Return the teacher's bits per byte of every document of the text `train`."""
    found: dict[str, float] = {}
    for path in (folder / "train").glob("*.documents.parquet"):
        columns = pyarrow.parquet.read_table(path).to_pydict()
        found |= dict(zip(columns["document_id"], columns["bits_per_byte"], strict=True))
    return found


def by_teacher(folder: Path) -> str:
    """Return the condition for documents that the teacher finds likeliest."""
    return _among(folder, 0, SHARE, lambda _: teacher_bits(folder))


def by_difference(folder: Path) -> str:
    """Return the condition for documents on which the teacher is furthest ahead of the student.

    Bits per byte of the teacher are in the table next to its losses, those of the healed student
    were measured; ranks of a difference have no column.
    """

    def differences(texts: dict[str, str]) -> dict[str, float]:
        teacher = teacher_bits(folder)
        record = json.loads((folder / "records" / "start-0.json").read_text("utf-8"))
        nats = dict(zip(texts, record["measured"]["0"]["train"]["nats"], strict=True))
        return {
            name: teacher[name] - nats[name] / math.log(2) / len(text.encode())
            for name, text in texts.items()
        }

    return _among(folder, 0, SHARE, differences)


_PLAIN = ("--method", "full")
ARMS = (
    Arm(name="all", options=_PLAIN),
    Arm(name="teacher", options=_PLAIN, rate="all", where=lambda _: f"smollm2.rank <= {SHARE}"),
    Arm(name="difference", options=_PLAIN, rate="all", where=by_difference),
    Arm(name="zlib", options=_PLAIN, rate="all", where=by_zlib),
    Arm(name="random", options=_PLAIN, rate="all", where=by_chance),
    Arm(name="oracle", options=_PLAIN, rate="all", where=lambda _: "kind = 'clean'"),
    Arm(name="tokens", options=("--method", "teacher", "--keep-fraction", 0.4), scored=True),
)


def _choice(method: str, keep: float) -> Arm:
    options = ("--method", method, "--keep-fraction", keep)
    return Arm(name=f"{method}-{keep}", options=options, scored="teacher" in method, order=1)


CHOICES = ("teacher-0.7", "teacher-0.85", "teacher_loss-0.7")
ORACLE, CHANCE = "oracle-tokens", "random-0.7"
SELECTIONS = (
    Arm(name=ORACLE, options=_PLAIN, program=("counted.py", "kind = 'clean'"), order=1),
    _choice("teacher", 0.7),
    _choice("teacher", 0.85),
    _choice("teacher_loss", 0.7),
    _choice("random", 0.7),
)
"""What is compared where every arm reads every document, and some tokens are left out."""


def build(
    data: Path,
    healing: Sequence[Document],
    *,
    share: float = 1.0,
    development: int | None = None,
    **mixture: Any,
) -> Texts:
    """Draw a share of the first experiment's noisy mixture.

    Args:
        data: folder of the sets.
        healing: what the student has read before.
        share: of the mixture.
        development: documents of the development set at most.
        mixture: arguments of `tokens.build`.
    """
    texts = tokens.build(data, healing, **mixture)
    noisy = sorted(texts["noisy"], key=Document.line)
    random.Random(SEED).shuffle(noisy)
    sets = {f"held_{name}": texts[f"held_{name}"] for name in SETS}
    return {"train": noisy[: round(share * len(noisy))], "dev": texts["dev"][:development], **sets}


def judge(folder: Path) -> str:
    """Return the tables and the verdict, by the rules of evidence/filter.md."""
    records = read_records(folder)
    said = [] if {arm.name for arm in SELECTIONS}.isdisjoint(records) else [selections(records)]
    if not said or any(arm in records for arm in FILTERS):
        said = [verdict(records), *said]
    told = "\n\n".join(said)
    return f"# A filtered corpus\n\n{told}\n{both_overviews(records, SETS, 'all')}"


def verdict(records: Records, num_seeds: int = 3) -> str:
    """Return what the rules say, or which runs are missing."""
    if missing := find_missing(records, ("all", *FILTERS, *BASELINES), num_seeds):
        return f"Not finished: {missing}."
    best = best_arm(records, FILTERS)
    found = _less(records, best, "all")
    loses = any(
        all(
            compare(records, baseline, arm, name, "last").mean <= 0
            for arm in FILTERS
            for name in DECIDING
        )
        for baseline in BASELINES
    )
    rule = _rule(found, "for filtering", "against", loses)
    return f"`{best}` less `all`: {_told(found)}. By the rules: **{rule}**."


def selections(records: Records, num_seeds: int = 3) -> str:
    """Return whether a selection of tokens wins, by the rules that were added, or what is missing.

    The oracle says whether one can: it knows which documents are clean.
    """
    if missing := find_missing(records, ("all", ORACLE, *CHOICES, CHANCE), num_seeds):
        return f"Selections of tokens, not finished: {missing}."
    best = best_arm(records, CHOICES)
    can, does = (_less(records, arm, "all") for arm in (ORACLE, best))
    lost = [difference.mean >= 0 for difference in can.values()]
    possible = _rule(can, "a selection can win", "no selection can be expected to win", any(lost))
    lost = [difference.mean >= 0 for difference in does.values()]
    won = _rule(does, "for the selection", "against the selection", all(lost))
    return (
        f"`{ORACLE}` less `all`: {_told(can)}. By the rules added: **{possible}**.\n"
        f"`{best}` less `all`: {_told(does)}. By the rules added: **{won}**.\n"
        f"`{best}` less `{CHANCE}`: {_told(_less(records, best, CHANCE))}."
    )


def _less(records: Records, arm: str, other: str) -> dict[str, Difference]:
    return {name: compare(records, arm, other, name, "last") for name in DECIDING}


def _rule(found: Mapping[str, Difference], wins: str, loses: str, lost: bool) -> str:
    if all(difference.is_below_zero for difference in found.values()):
        return wins
    return loses if lost else "undecided"


def _told(found: Mapping[str, Difference]) -> str:
    return ", ".join(f"{name} {difference}" for name, difference in found.items())


_BUILD = partial(build, share=0.25, held={"gsm8k": 120, "math": 120, "docstrings": 40})
_BRIEF = partial(_BUILD, development=20, held={"gsm8k": 60, "math": 60, "docstrings": 40})
FULL = Experiment(
    name="filter",
    build=_BUILD,
    aligned=("train", "dev"),
    scored={"train": ()},
    metadata=("kind",),
    arms=ARMS,
    units=10,
    search_units=3,
    start_measured=("train",),
    measured=(2, 4, 6, 8, 10),
    judge=judge,
)
SCALES = {
    "full": FULL,
    "small": replace(
        FULL,
        base=Base(batch_size=2, heal_until=200),
        build=partial(_BRIEF, share=1 / 32, held={"gsm8k": 60, "math": 60, "docstrings": 20}),
        measured=None,
    ),
    "once": replace(
        FULL,
        base=Base(heal_until=200),
        build=partial(_BRIEF, share=1.0, trained=600),
        arms=(*ARMS, *SELECTIONS),
        unit=10,
        units=4,
        search_units=2,
        warmup_steps=8,
        measured=None,
    ),
    "tiny": replace(
        FULL,
        base=TINY,
        build=partial(build, **tokens.TINY_TEXTS),
        arms=tuple(arm for arm in ARMS if arm.name in ("all", *FILTERS)),
        units=2,
        search_units=1,
        measured=(2,),
        seeds=(0,),
    ),
    "gpu": replace(
        FULL,
        base=Base(device="cuda", batch_size=32),
        build=partial(_BUILD, trained=None, held=tokens.held(500) | {"docstrings": 200}),
    ),
}
