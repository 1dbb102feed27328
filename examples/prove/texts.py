"""Texts that all experiments choose from: GSM8K, MATH, other questions, docstrings, and noise.

A document's id is KIND:SOURCE:NUMBER. Kinds are `clean`, `general` and those of `noise.py`.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docstring_corpus import docstrings

from pipeline.evaluation.sets import math_500
from prove.clearing import without_overlap
from prove.noise import FROM_NOTHING, FROM_TEXT, make_noise, spoil

SEED = 0
NOISE_SHARE = 0.3
HEALING_PACKAGES = ("numpy", "scipy", "sympy")
HELD_OUT_PACKAGES = ("networkx",)


@dataclass(frozen=True)
class Document:
    """A labelled text.

    Attributes:
        kind: clean, general, or a kind of noise.
        source: where the text comes from.
        number: in its source.
        text: as it is read.
    """

    kind: str
    source: str
    number: int
    text: str

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return len(self.text.encode())

    def line(self) -> str:
        """Return it as a JSON line."""
        name = f"{self.kind}:{self.source}:{self.number}"
        record = {"id": name, "text": self.text, "kind": self.kind}
        return json.dumps(record, ensure_ascii=False) + "\n"


Texts = dict[str, list[Document]]
"""Documents by the name of the text that they make."""


@dataclass(frozen=True)
class Pools:
    """What an experiment may draw from, shuffled by `SEED`.

    Attributes:
        train: mathematics without overlap with any problem that is held out.
        held: problems and texts to measure on, by set.
    """

    train: list[Document]
    held: Texts


def healing_texts(packages: Sequence[str] = HEALING_PACKAGES) -> list[Document]:
    """Return the docstrings that heal the pruned student, each once, shuffled."""
    texts = dict.fromkeys(text for package in packages for _, text in docstrings(package))
    found = [Document("general", "docstrings", number, text) for number, text in enumerate(texts)]
    random.Random(SEED).shuffle(found)
    return found


def read_pools(
    data: Path, healing: Sequence[Document], sets: Iterable[str], packages: Sequence[str]
) -> Pools:
    """Return texts to train on and the named sets, cleared of what they share.

    Args:
        data: folder of the sets as they are published, JSON lines.
        healing: what the student has read before.
        sets: gsm8k, math, mmlu_stem, tabmwp and docstrings.
        packages: whose docstrings are held out.

    Raises:
        SystemExit: nothing is left to train on.
    """
    problems = _read(data, "math", ("problem", "solution"))
    asked = {place for place in math_500() if place < len(problems)}
    held = {
        "gsm8k": _read(data, "gsm8k", ("question", "answer")),
        "math": [document for document in problems if document.number in asked],
    }
    train = _read(data, "gsm8k_train", ("question", "answer"))
    if (data / "math_train.jsonl").exists():
        train += _read(data, "math_train", ("problem", "solution"))
    else:
        train += [document for document in problems if document.number not in asked]
    if (data / "web.jsonl").exists():
        train += _read(data, "web", ("text",))
    for documents in (train, *held.values()):
        random.Random(SEED).shuffle(documents)
    # All that is held out, not the part that is measured: `vocag evaluate` asks other items, too.
    train = without_overlap(train, [*held["gsm8k"], *held["math"]])
    if not train:
        raise SystemExit(
            f"{data}: no document is left to train on, all are near held-out problems: is "
            "gsm8k_train.jsonl a copy of gsm8k.jsonl?"
        )
    for name in sorted(set(sets) - held.keys()):
        if name == "docstrings":
            held[name] = healing_texts(packages)
        elif name == "mmlu_stem":
            held[name] = _documents(name, map(_question, _records(data, name)))
        else:
            held[name] = _read(data, name, ("table_title", "table", "question", "solution"))
        random.Random(SEED).shuffle(held[name])
        held[name] = without_overlap(held[name], train)
    return Pools(train, {name: without_overlap(held[name], healing) for name in sets})


def _question(record: Mapping[str, Any]) -> str:
    """Return a question of MMLU with its choices and the right one's letter."""
    choices = zip("ABCD", record["choices"], strict=True)
    options = [f"{letter}. {choice}" for letter, choice in choices]
    return "\n".join([record["question"], *options, f"Answer: {'ABCD'[record['answer']]}"])


def _read(data: Path, name: str, fields: Sequence[str]) -> list[Document]:
    records = _records(data, name)
    return _documents(name, ("\n".join(r[f] for f in fields if r[f]) for r in records))


def _records(data: Path, name: str) -> list[dict[str, Any]]:
    with (data / f"{name}.jsonl").open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def _documents(source: str, texts: Iterable[str]) -> list[Document]:
    return [Document("clean", source, number, text) for number, text in enumerate(texts)]


def with_noise(
    documents: Sequence[Document], order: random.Random, *, start: int = 0
) -> list[Document]:
    """Return documents of which some are spoiled, next to some that never were text.

    Kinds are equally many bytes, together `NOISE_SHARE` of all. Noise that is made from a document
    takes its place, so no text is there twice.

    Args:
        documents: clean.
        order: of random choices; two calls make different noise.
        start: number of the first document that is made from nothing.
    """
    num_bytes = sum(document.num_bytes for document in documents)
    kinds = (*FROM_TEXT, *FROM_NOTHING)
    spoiled_share = NOISE_SHARE * len(FROM_TEXT) / len(kinds)
    made_share = NOISE_SHARE - spoiled_share
    # What is spoiled was there already; what is made comes on top.
    budget = num_bytes / (1 - made_share) * NOISE_SHARE / len(kinds)
    left = list(documents)
    order.shuffle(left)
    mixed: list[Document] = []
    for kind in FROM_TEXT:
        used = 0
        while used < budget and left:
            document = left.pop()
            mixed.append(replace(document, kind=kind, text=spoil(kind, document.text, order)))
            used += document.num_bytes
    for kind in FROM_NOTHING:
        used = 0
        while used < budget:
            mixed.append(Document(kind, "made", start + len(mixed), make_noise(kind, order)))
            used += mixed[-1].num_bytes
    mixed += left
    order.shuffle(mixed)
    return mixed


def write_texts(texts: Texts, folder: Path) -> None:
    """Write every text as JSON lines, and the bytes of each kind in bytes.json."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, dict[str, int]] = {}
    for name, documents in texts.items():
        lines = "".join(document.line() for document in documents)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")
        sizes[name] = {}
        for document in documents:
            sizes[name][document.kind] = sizes[name].get(document.kind, 0) + document.num_bytes
    (folder / "bytes.json").write_text(json.dumps(sizes, indent=1) + "\n", "utf-8")
