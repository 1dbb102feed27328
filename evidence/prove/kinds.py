r"""Twelve kinds of noise that no filter here was made for: which of them does a teacher find?

python evidence/prove/kinds.py text benchmarks --output kinds.jsonl
vocag align --input kinds.jsonl --metadata kind --output kinds --student MODEL --teacher MODEL
vocag score kinds --teacher MODEL --seq-length 1024 --dtype bfloat16
python evidence/prove/kinds.py scores kinds --output scores.jsonl
python evidence/prove/kinds.py table scores.jsonl
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path += [str(Path(__file__).parents[2] / name) for name in ("evidence", "examples")]

from prove.compare import table

SEED, NUM_CLEAN, NUM_SPOILED, LONGEST = 11, 90, 20, 750
_KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_CODE = (
    "for (int i = 0; i < n; ++i) { sum += a[i]; }",
    "var _gaq=_gaq||[];_gaq.push(['_setAccount','UA-1']);",
    "SELECT id, name FROM users WHERE age > 21;",
    "if err != nil { return nil, err }",
    ".nav li a:hover{color:#fff;background:#333}",
    "public static void main(String[] args) {",
    "$('#menu').on('click', function(){ $(this).toggleClass('open'); });",
)
_TAGS = (
    '<div class="post-content">',
    "</div>",
    "<br/>",
    '<span style="font-size:12px">',
    "</span>",
    "&nbsp;",
    '<a href="/login?next=%2Fq%2F123">',
    "</a>",
    '<img src="x.gif" alt=""/>',
    "&amp;#39;",
    '<td width="20%">',
    "</td>",
)
_SOLD = ("best", "cheap", "online", "math", "tutor", "homework", "help", "buy", "essay", "answers")


def _typos(text: str, order: random.Random, share: float) -> str:
    beside = {
        own: row[max(0, at - 1) : at] + row[at + 1 : at + 2]
        for row in _KEYS
        for at, own in enumerate(row)
    }
    return "".join(
        order.choice(beside[letter]) if letter in beside and order.random() < share else letter
        for letter in text
    )


def _word_order(text: str, order: random.Random) -> str:
    """Return sentences without articles, two words of each moved to its end."""
    found = []
    for sentence in re.split(r"(?<=[.?!])\s+", text):
        words = [w for w in sentence.split(" ") if w.lower() not in ("the", "a", "an", "of")]
        at = order.randrange(1, 3)
        moved = words[at : at + 2] if len(words) > 4 else []
        found.append(" ".join([*words[:at], *words[at + len(moved) :], *moved]))
    return " ".join(found)


def _code(text: str, order: random.Random) -> str:
    sentences = text.split(". ")
    sentences[::2] = [f"{each}\n{order.choice(_CODE)}\n" for each in sentences[::2]]
    return ". ".join(sentences)


def _html(text: str, order: random.Random) -> str:
    words = text.split(" ")
    return "".join(w + " " + (order.choice(_TAGS) if order.random() < 0.25 else "") for w in words)


def _mojibake(text: str, order: random.Random) -> str:
    for plain, typeset in ("'’", '"“', "-—"):
        text = text.replace(plain, typeset)
    text = text.replace("e ", "é ", 6)
    return text.encode().decode("cp1252", errors="replace")


def _wrong(number: str, order: random.Random) -> str:
    return str(max(0, int(number[:6]) + order.choice((-3, -2, -1, 1, 2, 5, 10))))


def _wrong_numbers(text: str, order: random.Random) -> str:
    def changed(found: re.Match[str]) -> str:
        return _wrong(found[0], order) if order.random() < 0.4 else found[0]

    return re.sub(r"\d+", changed, text)


KINDS: Mapping[str, Callable[[str, random.Random], str]] = {
    "keyword spam": lambda text, order: " ".join(order.choices(_SOLD, k=90)),
    "10 % of letters mistyped": lambda text, order: _typos(text, order, 0.10),
    "3 % of letters mistyped": lambda text, order: _typos(text, order, 0.03),
    "lines cut by a third": lambda text, _: "\n".join(
        line[: len(line) * 2 // 3] for line in re.findall(r".{1,60}", text, re.S)
    ),
    "another word order": _word_order,
    "lines of code between sentences": _code,
    "HTML remnants": _html,
    "mojibake": _mojibake,
    "LaTeX without backslashes": lambda text, _: text.replace("\\", ""),
    "40 % of numbers wrong": _wrong_numbers,
    "last number wrong": lambda text, order: re.sub(
        r"(\d+)(?=\D*$)", lambda found: _wrong(found[0], order), text
    ),
    "a paragraph five times": lambda text, _: "\n".join([text[:180]] * 5),
}


def documents(data: Path) -> Iterator[dict[str, str]]:
    """Yield clean documents, and some of them spoiled by each kind."""
    order = random.Random(SEED)

    def read(name: str, *fields: str) -> list[str]:
        lines = (data / f"{name}.jsonl").read_text("utf-8").split("\n")
        texts = ["\n".join(json.loads(line)[f] for f in fields) for line in lines if line]
        order.shuffle(texts)
        return [text for text in map(_as_prose, texts) if 200 < len(text) < LONGEST]

    school, contest = read("gsm8k_train", "question", "answer"), read("math", "problem", "solution")
    half = NUM_CLEAN // 2
    typeset = [text for text in contest[half:] if text.count("\\") > 6][:NUM_SPOILED]
    others = [text for text in contest[half:] if text not in typeset]
    ordinary = school[half:][: NUM_SPOILED // 2] + others[: NUM_SPOILED // 2]
    clean = [*school[:half], *contest[:half], *ordinary, *typeset]
    yield from ({"id": f"clean:{n}", "kind": "clean", "text": t} for n, t in enumerate(clean))
    for kind, spoil in KINDS.items():
        for number, text in enumerate(typeset if "LaTeX" in kind else ordinary):
            yield {"id": f"{kind}:{number}", "kind": kind, "text": spoil(text, order)}


def _as_prose(text: str) -> str:
    return re.sub(r"<<.*?>>", "", text).replace("####", "The answer is")


def scores(folder: str) -> Iterator[dict[str, object]]:
    """Yield what `vocag score` has stored of each document of a dataset."""
    from pipeline.explore.scores import named_scores, read_table
    from vocag import open_dataset

    dataset = open_dataset(folder)
    ((_, score),) = named_scores(dataset, ()).items()
    columns = {name: (score, name) for name in ("bits_per_byte", "largest_window")}
    found = read_table(dataset, columns, by="kind")
    for kind, *values in zip(found.group.tolist(), *found.values.values(), strict=True):
        yield {"kind": kind} | dict(zip(columns, values, strict=True))


def auc(noise: NDArray[np.float64], clean: NDArray[np.float64]) -> float:
    """Return the probability that noise has the larger number, half of it where they are equal.

    Example:
        >>> auc(np.array([1.0, 3.0]), np.array([1.0, 2.0]))
        0.625
    """
    larger = noise[:, None] > clean
    return float(np.mean(larger + 0.5 * (noise[:, None] == clean)))


def overview(rows: Sequence[Mapping[str, float | str]]) -> str:
    """Return what each kind costs and what thresholds from clean text keep, as Markdown.

    Args:
        rows: what `scores` yields.
    """
    kinds = np.array([row["kind"] for row in rows])
    bits, window = (
        np.array([row[name] for row in rows], np.float64)
        for name in ("bits_per_byte", "largest_window")
    )
    clean = kinds == "clean"
    # As `vocag explore scores --by kind` prints them: a document's own number.
    low, high = np.quantile(bits[clean], (0.05, 0.95), method="inverted_cdf")
    widest = np.quantile(window[clean], 0.95, method="inverted_cdf")
    below = bits <= high
    both = below & (window <= widest)
    cells: list[list[object]] = []
    for kind in ("clean", *KINDS):
        own = kinds == kind
        shares = [f"{100 * kept[own].mean():.0f} %" for kept in (below, both, both & (bits >= low))]
        areas = [f"{auc(values[own], values[clean]):.3f}" for values in (bits, window)]
        shown = ["", ""] if kind == "clean" else areas
        cells.append([kind, f"{np.median(bits[own]):.2f}", *shown, *shares])
    heads = ["kind", "median", "AUC", "AUC of `largest_window`", f"`bits_per_byte <= {high:.2f}`"]
    heads += [f"and `largest_window <= {widest:.2f}`", f"and `bits_per_byte >= {low:.2f}`"]
    return table(heads, cells)


def main() -> None:
    """Write texts, or scores, or print the table."""
    parser = argparse.ArgumentParser(description="Twelve kinds of noise, and who finds them.")
    parser.add_argument("what", choices=("text", "scores", "table"))
    parser.add_argument("source", help="folder of GSM8K and MATH; the scored dataset; its scores")
    parser.add_argument("--output", type=Path, help="JSON lines of text and scores")
    options = parser.parse_args()
    if options.what == "table":
        lines = Path(options.source).read_text("utf-8").splitlines()
        print(overview([json.loads(line) for line in lines]), end="")
        return
    if options.output is None:
        parser.error(f"{options.what} needs --output FILE")
    made = documents(Path(options.source)) if options.what == "text" else scores(options.source)
    lines = [json.dumps(found, ensure_ascii=False) + "\n" for found in made]
    options.output.write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main()
