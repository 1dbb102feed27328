"""A filtered corpus: can a teacher's stored losses choose whole documents?

docs/evidence/filter.md says what is compared and what counts.
"""

import json
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow.parquet

from prove import tokens
from prove.compare import Records, best_arm, both_overviews, compare, read_records
from prove.experiment import TINY, Arm, Base, Experiment
from prove.texts import Document, Texts

SEED = 21
SHARE = 0.65


@dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
        mixture: of the first experiment, whose noisy mixture is drawn from.
        share: of that mixture.
        development: documents of the development set at most.
        problems: of GSM8K and of MATH that are measured.
        docstrings: that are measured.
    """

    mixture: tokens.Size
    share: float = 0.25
    development: int | None = None
    problems: int = 120
    docstrings: int = 40


SIZES = {
    "full": Size(tokens.SIZES["full"]),
    "small": Size(tokens.SIZES["full"], 1 / 32, 20, 60, 20),
    "once": Size(replace(tokens.SIZES["full"], trained=600), 1.0, 20, 60, 40),
    "tiny": Size(tokens.SIZES["tiny"], 1.0),
    "gpu": Size(tokens.SIZES["gpu"], 0.25, None, 500, 200),
}
DECIDING = ("gsm8k", "math")
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
    with (folder / "text" / "train.jsonl").open(encoding="utf-8", newline="\n") as file:
        texts = {record["id"]: record["text"] for record in map(json.loads, file)}
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


def by_difference(folder: Path) -> str:
    """Return the condition for documents on which the teacher is furthest ahead of the student.

    Bits per byte of the teacher are in the table next to its losses, those of the healed student
    were measured; ranks of a difference have no column.
    """

    def differences(texts: dict[str, str]) -> dict[str, float]:
        teacher: dict[str, float] = {}
        for path in (folder / "train").glob("*.documents.parquet"):
            columns = pyarrow.parquet.read_table(path).to_pydict()
            teacher |= dict(zip(columns["document_id"], columns["bits_per_byte"], strict=True))
        sums = json.loads((folder / "start.json").read_text("utf-8"))["start"]["train"]
        nats = dict(zip(texts, sums["nats"], strict=True))
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


def experiment(scale: str) -> Experiment:
    """Return the experiment at a scale."""
    tiny = scale == "tiny"
    arms = [arm for arm in ARMS if arm.name in ("all", "teacher", "difference")] if tiny else ARMS
    bases = {
        "full": Base(),
        "small": Base(batch_size=2, heal_until=200),
        "once": Base(heal_until=200),
        "tiny": TINY,
        "gpu": Base(device="cuda", batch_size=32),
    }
    units, search = {"tiny": (2, 1), "once": (4, 2)}.get(scale, (10, 3))
    return Experiment(
        name="filter",
        scale=scale,
        base=bases[scale],
        build=partial(build, SIZES[scale]),
        aligned=("train", "dev"),
        scored={"train": ()},
        metadata=("kind",),
        arms=tuple(arms),
        unit=14 if scale == "once" else None,
        units=units,
        search_units=search,
        warmup_steps=8 if scale == "once" else None,
        measures_start=True,
        measured={"tiny": (2,), "small": None, "once": None}.get(scale, (2, 4, 6, 8, 10)),
        seeds=(0,) if tiny else (0, 1, 2),
        judge=judge,
    )


def build(size: Size, data: Path, healing: Sequence[Document]) -> Texts:
    """Draw a share of the first experiment's noisy mixture."""
    texts = tokens.build(size.mixture, data, healing)
    mixture = sorted(texts["noisy"], key=Document.line)
    random.Random(SEED).shuffle(mixture)
    return {
        "train": mixture[: round(size.share * len(mixture))],
        "dev": texts["dev"][: size.development],
        "held_gsm8k": texts["held_gsm8k"][: size.problems],
        "held_math": texts["held_math"][: size.problems],
        "held_docstrings": texts["held_docstrings"][: size.docstrings],
    }


def judge(folder: Path) -> str:
    """Return the tables and the verdict, by the rules of docs/evidence/filter.md."""
    records = read_records(folder)
    tables = both_overviews(records, (*DECIDING, "docstrings"), "all")
    return "\n".join(["# A filtered corpus", "", verdict(records), "", tables])


def verdict(records: Records, num_seeds: int = 3) -> str:
    """Return what the rules say, or which runs are missing."""
    needed = ("all", "teacher", "difference", *BASELINES)
    missing = [name for name in needed if len(records.get(name, {})) < num_seeds]
    if missing:
        return f"Not finished: {', '.join(missing)}."
    best = best_arm(records, ("teacher", "difference"))
    found = [compare(records[best], records["all"], name, "last") for name in DECIDING]
    wins = all(difference.is_below_zero for difference in found)
    loses = any(
        all(
            compare(records[baseline], records[arm], name, "last").mean <= 0
            for arm in ("teacher", "difference")
            for name in DECIDING
        )
        for baseline in BASELINES
    )
    rule = "for filtering" if wins else "against" if loses else "undecided"
    bits = ", ".join(f"{n} {d}" for n, d in zip(DECIDING, found, strict=True))
    return f"`{best}` less `all`: {bits}. By the rules: **{rule}**."
