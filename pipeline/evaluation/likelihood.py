"""Likelihoods of right texts, per byte; they improve long before answers are right.

lm-eval calls the functions by name, from the files in `tasks/`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.evaluation.sets import Item

Document = Mapping[str, Any]
Likelihood = tuple[float, bool]


def text_to_score(item: Item, measure: str) -> str:
    """Return the one text whose likelihood is measured, or "".

    The space before a solution or an answer is part of it: lm-eval adds none.
    """
    if measure == "text":
        return f"Problem:\n{item.problem}\nSolution:\n{item.solution or item.answer}"
    return f" {getattr(item, measure)}" if measure in ("solution", "answer") else ""


def scored(document: Document) -> str:
    """Return `text_to_score`'s result; lm-eval can't read a plain field."""
    return str(document["scored"])


def score(document: Document, results: Sequence[Likelihood]) -> dict[str, Any]:
    """Return the scored text's log-likelihood (nats) and length (bytes).

    Tokens before it and its end aren't scored, as in `heldout_bits_per_byte`.
    """
    return {"bits_per_byte": (results[0][0], len(document["scored"].encode()))}


def score_options(document: Document, results: Sequence[Likelihood]) -> dict[str, Any]:
    """Score options: `accuracy`, `chance`, and the right one's `bits_per_byte`.

    Chosen is the option that the problem makes likelier by most.
    """
    options, label = document["options"], document["label"]
    values = np.array([likelihood for likelihood, _ in results])
    given, alone = values[: len(options)], values[len(options) :]
    num_bytes = 1 + len(options[label].encode())  # the space before an option is scored with it
    return {
        "accuracy": float((given - alone).argmax() == label),
        "chance": 1 / len(options),
        "bits_per_byte": (float(given[label]), num_bytes),
    }
