"""Texts, sets and records as the experiments of evidence/ have them, made up."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prove.texts import Document


def make_words(count: int, seed: int) -> list[str]:
    """Return random words of six letters."""
    order = random.Random(seed)
    return ["".join(order.choices("abcdefghij", k=6)) for _ in range(count)]


def make_document(text: str, number: int = 0) -> Document:
    """Return a clean problem."""
    return Document("clean", "math", number, text)


def make_record(arm: str, seed: int, nats: Iterable[float], sets: Iterable[str]) -> dict[str, Any]:
    """Return a run's record of two units in which all sets have the same three documents."""
    sums = {"bytes": [10.0, 20.0, 30.0], "nats": list(nats)}
    of_sets = dict.fromkeys(sets, sums)
    record = {"arm": arm, "seed": seed, "rate": 1e-3, "units": 2, "best": 1, "measured": {}}
    return record | {"development": [sum(nats), 99.0], "measured": {"1": of_sets, "2": of_sets}}


def write_benchmarks(folder: Path) -> None:
    """Write problems of which no two are near each other under the names of GSM8K and others."""
    folder.mkdir()
    order = random.Random(0)

    def problem(number: int) -> tuple[str, str]:
        a, b = order.randrange(90), order.randrange(90)
        words = " ".join(make_words(12, order.randrange(10**9)))
        return (
            f"{words} {a} pens and {b} more.",
            f"Pens: {a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}",
        )

    question = {"question": "What?", "choices": list("wxyz"), "answer": 1}
    lines = [json.dumps(question | {"question": " ".join(make_words(9, n))}) for n in range(30)]
    (folder / "mmlu_stem.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    for name, fields, count in (
        ("gsm8k_train", ("question", "answer"), 80),
        ("gsm8k", ("question", "answer"), 20),
        ("math", ("problem", "solution"), 5000),
    ):
        lines = [json.dumps(dict(zip(fields, problem(n), strict=True))) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
