"""Measures of what a model gives the right text: they move long before an answer is right.

Everything is by the byte, never by the token, so that students of different vocabularies compare.
lm-eval calls the functions; the files in `tasks/` name them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Document = Mapping[str, Any]
Likelihood = tuple[float, bool]


def whole_text(document: Document) -> str:
    """Return problem and solution as one text; the answer where there is no solution."""
    told = document["solution"] or document["answer"]
    return f"Problem:\n{document['problem']}\nSolution:\n{told}"


def solution(document: Document) -> str:
    """Return what follows "Solution:", the space before it included.

    lm-eval puts no delimiter before the target of a plain loglikelihood.
    """
    return f" {document['solution']}"


def answer(document: Document) -> str:
    """Return what follows "Answer:", likewise."""
    return f" {document['answer']}"


def score_text(document: Document, results: Sequence[Likelihood]) -> dict[str, Any]:
    """Return the whole text's log-likelihood (nats) with its length (bytes).

    What stands before a text (BOS, or what separates documents) is its context and costs nothing;
    its end isn't asked for. `heldout_bits_per_byte` of the trainer counts likewise.
    """
    return {"bits_per_byte": (results[0][0], len(whole_text(document).encode()))}


def score_solution(document: Document, results: Sequence[Likelihood]) -> dict[str, Any]:
    """Return the solution's log-likelihood (nats) with its length (bytes)."""
    return {"bits_per_byte": (results[0][0], len(solution(document).encode()))}


def score_answer(document: Document, results: Sequence[Likelihood]) -> dict[str, Any]:
    """Return the bare answer's log-likelihood (nats) with its length (bytes)."""
    return {"bits_per_byte": (results[0][0], len(answer(document).encode()))}


def score_options(document: Document, results: Sequence[Likelihood]) -> dict[str, Any]:
    """Score options by their texts' likelihoods, with and without the problem.

    Args:
        document: with its options.
        results: one for each option, then one for each without the problem, in nats.

    Returns:
        `accuracy` by what the problem adds to an option's likelihood, which asks of no option to
        be likely by itself; `chance`; `bits_per_byte` of the right option.
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
