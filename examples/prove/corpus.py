"""The texts of the experiment: general English, mathematics with noise in it, and what is held out.

    python examples/prove/corpus.py --data benchmarks --output prove/text

`--data` is a folder with gsm8k_train.jsonl and gsm8k.jsonl (question, answer) and math.jsonl, and
math_train.jsonl where there is one (problem, solution). Of MATH's test set the 500 are held out
that `vocag evaluate` asks, too; where there is no training set, the others are trained on. Larger
experiments need more: web.jsonl (text), where there is one, is trained on likewise.

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

# Of the noisy mixture: what the gate reads, and what is counted after training; 200 rows and more.
NUM_GATE = 400


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
    general = _docstrings(options.packages)[: options.num_general]
    train, held = _mathematics(options.data)
    # All that is held out, not the part that is measured: `vocag evaluate` asks other items, too.
    train = without_overlap(train, [*held["gsm8k"], *held["math"]])[: options.num_documents]
    dev, last, main = _divide(train, (DEV_SHARE, LAST_SHARE))
    main = main[: options.num_trained]
    if not main:
        raise SystemExit(
            f"{options.data}: no document is left to train on, all are near held-out problems: is "
            "gsm8k_train.jsonl a copy of gsm8k.jsonl?"
        )
    spoiled = with_noise(dev, random.Random("held_noise"), start=2 * 10**6)
    measured = {
        name: without_overlap(documents, general)[: options.num_held_out]
        for name, documents in held.items()
    }
    others = without_overlap(_docstrings(options.held_out_packages), [*general, *train])
    measured["docstrings"] = others[: options.num_held_out_general]
    measured["noise"] = [document for document in spoiled if document.kind != "clean"]
    noisy = with_noise(main, random.Random("noisy"))
    return {
        "heal": general,
        "gate": noisy[:NUM_GATE],
        "noisy": noisy,
        "clean": main,
        "last": with_noise(last, random.Random("last"), start=10**6),
        "dev": dev,
        **{f"held_{name}": documents for name, documents in measured.items()},
    }


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


def _mathematics(data: Path) -> tuple[list[Document], dict[str, list[Document]]]:
    """Return documents to train on, and the held-out ones of each set, both shuffled."""
    math = _read(data / "math.jsonl", ("problem", "solution"))
    places = {place for place in math_500() if place < len(math)}
    held = {
        "gsm8k": _read(data / "gsm8k.jsonl", ("question", "answer")),
        "math": [document for document in math if document.number in places],
    }
    train = _read(data / "gsm8k_train.jsonl", ("question", "answer"))
    if (data / "math_train.jsonl").exists():
        train += _read(data / "math_train.jsonl", ("problem", "solution"))
    else:
        train += [document for document in math if document.number not in places]
    if (data / "web.jsonl").exists():
        train += _read(data / "web.jsonl", ("text",))
    for documents in (train, *held.values()):
        random.Random(SEED).shuffle(documents)
    return train, held


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
    parser.add_argument("--num-trained", type=int, help="of them in the mixtures at most")
    parser.add_argument("--num-held-out", type=int, default=500, help="problems of a set at most")
    parser.add_argument("--num-held-out-general", type=int, default=200, help="docstrings likewise")
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
