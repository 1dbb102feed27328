"""The texts of the experiment: general English, mathematics with noise in it, and what is held out.

    python examples/prove/corpus.py --data benchmarks --output prove/text

`--data` is a folder with gsm8k_train.jsonl and gsm8k.jsonl (question, answer) and math.jsonl, and
math_train.jsonl where there is one (problem, solution). Of MATH's test set the 500 are held out
that `vocag evaluate` asks, too; where there is no training set, the others are trained on.

A document's id is KIND:SOURCE:NUMBER. Kinds of mathematics are `clean` and those of `noise.py`;
noise that is made from a document takes its place, so that no text is there twice.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from docstring_corpus import docstrings

from pipeline.evaluation.sets import math_500
from prove.clearing import without_overlap
from prove.noise import FROM_NOTHING, FROM_TEXT, make_noise, spoil

SEED = 0
NOISE_SHARE = 0.3
# Of the mathematics: what the last stage reads, and what learning rates are searched on.
LAST_SHARE, DEV_SHARE = 0.15, 0.03


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

    def line(self) -> str:
        """Return it as a JSON line."""
        name = f"{self.kind}:{self.source}:{self.number}"
        return json.dumps({"id": name, "text": self.text}, ensure_ascii=False) + "\n"


def build(options: argparse.Namespace) -> dict[str, list[Document]]:
    """Return every part of the experiment's text by its name."""
    order = random.Random(SEED)
    train, held = _mathematics(options.data, options.num_held_out, order)
    train = without_overlap(train, [*held["gsm8k"], *held["math"]])[: options.num_documents]
    general = _docstrings(options.packages)[: options.num_general]
    names = _docstrings(options.held_out_packages)
    order.shuffle(names)
    held["docstrings"] = without_overlap(names, [*general, *train])[: options.num_held_out]
    dev, last, main = _divide(train, (DEV_SHARE, LAST_SHARE))
    parts = {
        "heal": general,
        "noisy": with_noise(main, order),
        "clean": main,
        "last": with_noise(last, order, start=10**6),
        "dev": dev,
        **{f"held_{name}": documents for name, documents in held.items()},
    }
    spoiled = with_noise(dev, order, start=2 * 10**6)
    parts["held_noise"] = [document for document in spoiled if document.kind != "clean"]
    return parts


def with_noise(
    documents: Sequence[Document], order: random.Random, *, start: int = 0
) -> list[Document]:
    """Return documents of which some are spoiled, and some stand beside them that never were text.

    Kinds are equally many bytes, together `NOISE_SHARE` of all.

    Args:
        documents: clean.
        order: of random choices; two calls make different noise.
        start: number of the first document that is made from nothing.
    """
    num_bytes = sum(len(document.text.encode()) for document in documents)
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
            used += len(document.text.encode())
    for kind in FROM_NOTHING:
        used = 0
        while used < budget:
            text = make_noise(kind, order)
            mixed.append(Document(kind, "made", start + len(mixed), text))
            used += len(text.encode())
    mixed += left
    order.shuffle(mixed)
    return mixed


def _mathematics(
    data: Path, num_held_out: int, order: random.Random
) -> tuple[list[Document], dict[str, list[Document]]]:
    """Return documents to train on, and the held-out ones of each set."""
    gsm8k = _read(data / "gsm8k_train.jsonl", ("question", "answer"))
    math = _read(data / "math.jsonl", ("problem", "solution"))
    places = {place for place in math_500() if place < len(math)}
    held = {
        "gsm8k": _read(data / "gsm8k.jsonl", ("question", "answer")),
        "math": [document for document in math if document.number in places],
    }
    rest = [document for document in math if document.number not in places]
    if (data / "math_train.jsonl").exists():
        rest = _read(data / "math_train.jsonl", ("problem", "solution"))
    for documents in held.values():
        order.shuffle(documents)
    train = gsm8k + rest
    order.shuffle(train)
    return train, {name: documents[:num_held_out] for name, documents in held.items()}


def _read(path: Path, fields: Iterable[str]) -> list[Document]:
    with path.open(encoding="utf-8", newline="\n") as file:
        records = [json.loads(line) for line in file]
    return [
        Document("clean", path.stem, number, "\n".join(record[field] for field in fields))
        for number, record in enumerate(records)
    ]


def _docstrings(packages: Sequence[str]) -> list[Document]:
    texts = dict.fromkeys(text for package in packages for _, text in docstrings(package))
    found = [Document("general", "docstrings", number, text) for number, text in enumerate(texts)]
    random.Random(SEED).shuffle(found)
    return found


def _divide(documents: list[Document], shares: Sequence[float]) -> list[list[Document]]:
    parts, start = [], 0
    for share in shares:
        stop = start + max(1, round(share * len(documents)))
        parts.append(documents[start:stop])
        start = stop
    return [*parts, documents[start:]]


def main() -> None:
    """Write every part as JSON lines, and what they hold."""
    parser = argparse.ArgumentParser(description="Build the texts of the experiment.")
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K and MATH")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--packages", nargs="+", default=["numpy", "scipy", "sympy"])
    parser.add_argument("--held-out-packages", nargs="+", default=["networkx"])
    parser.add_argument("--num-general", type=int, help="docstrings at most")
    parser.add_argument("--num-documents", type=int, help="clean mathematical documents at most")
    parser.add_argument("--num-held-out", type=int, default=500, help="of each set at most")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, dict[str, int]] = {}
    for name, documents in build(options).items():
        path = options.output / f"{name}.jsonl"
        path.write_text("".join(document.line() for document in documents), "utf-8")
        sizes[name] = {}
        for document in documents:
            size = len(document.text.encode())
            sizes[name][document.kind] = sizes[name].get(document.kind, 0) + size
        print(name, sizes[name])
    (options.output / "bytes.json").write_text(json.dumps(sizes, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
