"""Texts that all experiments choose from: GSM8K, MATH, other questions, docstrings, and noise.

A document's id is KIND:SOURCE:NUMBER. Kinds are `clean`, `general` and those of `noise.py`.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docstring_corpus import docstrings
from hold_out import word_runs

from pipeline.evaluation.sets import math_500
from prove.noise import FROM_NOTHING, FROM_TEXT, make_noise, spoil

SEED = 0
NOISE_SHARE = 0.3
HEALING_PACKAGES = ("numpy", "scipy", "sympy")
HELD_OUT_PACKAGES = ("networkx",)
SHINGLE_WORDS, NEAR = 5, 0.5
"""Two texts are near duplicates if this share of their shingles is common, numbers aside."""


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


def healing_texts(packages: Sequence[str] = HEALING_PACKAGES) -> list[Document]:
    """Return the docstrings that heal the pruned student, each once, shuffled."""
    texts = dict.fromkeys(text for package in packages for _, text in docstrings(package))
    found = [Document("general", "docstrings", number, text) for number, text in enumerate(texts)]
    random.Random(SEED).shuffle(found)
    return found


def read_pools(
    data: Path,
    healing: Sequence[Document],
    held: Mapping[str, int],
    packages: Sequence[str] = HELD_OUT_PACKAGES,
) -> tuple[list[Document], Texts]:
    """Return mathematics to train on, and texts to measure on as `held_NAME`; both shuffled.

    What is trained on shares nothing with any problem that could be held out, and the texts to
    measure on share nothing with what was trained on or healed.

    Args:
        data: folder of the sets as they are published, JSON lines.
        healing: what the student has read before.
        held: documents at most of gsm8k, math, mmlu_stem, tabmwp and docstrings.
        packages: whose docstrings are held out.

    Raises:
        SystemExit: a set is missing, or nothing is left to train on.
    """
    problems = _read(data, "math", ("problem", "solution"))
    asked = {place for place in math_500() if place < len(problems)}
    train = read_questions(data, "gsm8k_train")
    if (data / "math_train.jsonl").exists():
        train += _read(data, "math_train", ("problem", "solution"))
    else:
        train += [document for document in problems if document.number not in asked]
    if (data / "web.jsonl").exists():
        train += _read(data, "web", ("text",))
    pools = {
        "gsm8k": read_questions(data, "gsm8k"),
        "math": [document for document in problems if document.number in asked],
    }
    for documents in (train, *pools.values()):
        random.Random(SEED).shuffle(documents)
    # All that is held out, not the part that is measured: `vocag evaluate` asks other items, too.
    train = without_overlap(train, [*pools["gsm8k"], *pools["math"]])
    if not train:
        raise SystemExit(
            f"{data}: no document is left to train on, all are near held-out problems: is "
            "gsm8k_train.jsonl a copy of gsm8k.jsonl?"
        )
    for name in sorted(held.keys() - pools.keys()):
        if name == "docstrings":
            found = healing_texts(packages)
        elif name == "mmlu_stem":
            found = _documents(name, map(_question, _records(data, name)))
        else:
            found = _read(data, name, ("table_title", "table", "question", "solution"))
        random.Random(SEED).shuffle(found)
        pools[name] = without_overlap(found, train)
    texts = {name: without_overlap(pools[name], healing)[:most] for name, most in held.items()}
    return train, {f"held_{name}": documents for name, documents in texts.items()}


def read_questions(data: Path, name: str) -> list[Document]:
    """Return the problems of GSM8K, or of its training set, with their answers."""
    return _read(data, name, ("question", "answer"))


def _question(record: Mapping[str, Any]) -> str:
    """Return a question of MMLU with its choices and the right one's letter."""
    choices = zip("ABCD", record["choices"], strict=True)
    options = [f"{letter}. {choice}" for letter, choice in choices]
    return "\n".join([record["question"], *options, f"Answer: {'ABCD'[record['answer']]}"])


def _read(data: Path, name: str, fields: Sequence[str]) -> list[Document]:
    records = _records(data, name)
    return _documents(name, ("\n".join(r[f] for f in fields if r[f]) for r in records))


def _records(data: Path, name: str) -> list[dict[str, Any]]:
    path = data / f"{name}.jsonl"
    if not path.exists():
        raise SystemExit(f"{path} is missing: evidence/README.md says what DATA must hold")
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def _documents(source: str, texts: Iterable[str]) -> list[Document]:
    return [Document("clean", source, number, text) for number, text in enumerate(texts)]


def without_overlap(documents: Sequence[Document], others: Sequence[Document]) -> list[Document]:
    """Return the documents that share no run of 13 words with others, and are near none of them."""
    runs = {run for other in others for run in word_runs(other.text)}
    shingles = [_shingles(other.text) for other in others]
    having: dict[int, list[int]] = {}
    for number, own in enumerate(shingles):
        for shingle in own:
            having.setdefault(shingle, []).append(number)

    def is_near(own: set[int]) -> bool:
        common = Counter(number for shingle in own for number in having.get(shingle, ()))
        return any(
            count >= NEAR * (len(own) + len(shingles[number]) - count)
            for number, count in common.items()
        )

    return [
        document
        for document in documents
        if runs.isdisjoint(word_runs(document.text)) and not is_near(_shingles(document.text))
    ]


def _shingles(text: str) -> set[int]:
    return set(word_runs(re.sub(r"\d+", "0", text), SHINGLE_WORDS))


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
    sizes: dict[str, Counter[str]] = {}
    for name, documents in texts.items():
        lines = "".join(document.line() for document in documents)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")
        sizes[name] = Counter()
        for document in documents:
            sizes[name][document.kind] += document.num_bytes
    (folder / "bytes.json").write_text(json.dumps(sizes, indent=1) + "\n", "utf-8")


def read_texts(path: Path) -> dict[str, str]:
    """Return the texts of a file of JSON lines by their documents' ids."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return {record["id"]: record["text"] for record in map(json.loads, file)}
