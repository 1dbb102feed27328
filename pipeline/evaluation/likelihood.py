"""Likelihood measures of the right text: they move long before an answer is right.

Everything is per byte, never per token, so that students of different vocabularies compare. lm-eval
calls the functions, which the files in `tasks/` name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.evaluation.sets import Item

Document = Mapping[str, Any]
Likelihood = tuple[float, bool]


def text_to_score(item: Item, measure: str) -> str:
    """Return the text whose likelihood is measured; "" if there isn't a single one.

    The space before a solution or an answer is scored with it: lm-eval adds none in a plain
    loglikelihood.
    """
    if measure == "text":
        return f"Problem:\n{item.problem}\nSolution:\n{item.solution or item.answer}"
    return f" {getattr(item, measure)}" if measure in ("solution", "answer") else ""


def scored(document: Document) -> str:
    """Return the result of `text_to_score`; lm-eval can't read a plain field."""
    return str(document["scored"])


def score(document: Document, results: Sequence[Likelihood]) -> dict[str, Any]:
    """Return the scored text's log-likelihood (nats) with its length (bytes).

    The tokens before a text (BOS or a separator) cost nothing; its end isn't scored. The trainer's
    `heldout_bits_per_byte` counts the same way.
    """
    return {"bits_per_byte": (results[0][0], len(document["scored"].encode()))}


def score_options(document: Document, results: Sequence[Likelihood]) -> dict[str, Any]:
    """Score options by their texts' likelihoods in nats, with the problem and then without.

    Returns:
        `accuracy` by what the problem adds to an option's likelihood, so no option has
        to be likely on its own; `chance`; `bits_per_byte` of the right option.
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
