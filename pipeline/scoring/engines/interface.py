"""The interface of every engine; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.models.probe import require_trained
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.sidecars import DocumentTokens
from schemas.stored_distributions import TopTokens


class EngineError(ValueError):
    """A teacher can't be asked, or gives impossible losses."""


@dataclass
class Work:
    """Cost of scoring; tokens include contexts, places also padding."""

    num_tokens: int = 0
    num_places: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class ScoredDocuments:
    """The losses of some documents, [M], nats, NaN without a context.

    `top` are the likeliest tokens at each position, rounded as stored.
    """

    losses: NDArray[np.float32]
    work: Work
    top: TopTokens | None = None


class Engine(Protocol):
    """A teacher that is ready to score."""

    @property
    def rule(self) -> ContextRule:
        """Its contexts."""

    @property
    def vocab_size(self) -> int:
        """Tokens among which it chooses."""

    def score(
        self,
        tokens: DocumentTokens,
        pieces: Pieces,
        *,
        names: Sequence[str] = (),
        advance: Callable[[int], object] = int,
    ) -> ScoredDocuments:
        """Give each token the loss `-log P(x_l | its context)`.

        `names` are the documents' ids, for errors; `advance` gets the number of losses started
        since its last call. ValueError for a token or piece that the teacher can't take, or if it
        gives no losses.
        """


@dataclass(frozen=True)
class Line:
    """One piece as a teacher reads it, with any context token first.

    `places`, [n], are of the tokens whose losses are taken, `targets` their indices among the
    documents' tokens. They are expected at the documents' `positions`; one more follows a
    document's last token.
    """

    input_ids: NDArray[np.int64]
    places: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]


def line_of(tokens: DocumentTokens, pieces: Pieces, number: int, rule: ContextRule) -> Line:
    """Return one piece, by number, as a teacher reads it."""
    context = rule.context_token(continues=bool(pieces.continues[number]))
    added = np.array([] if context is None else [context], np.int64)
    document = pieces.document[number]
    first, end = tokens.starts[document : document + 2].tolist()
    start, stop = first + int(pieces.start[number]), first + int(pieces.stop[number])
    # Nothing comes before the first token of a piece without a context token.
    targets = np.arange(start + 1 - len(added), stop)
    line = np.concatenate([added, tokens.input_ids[start:stop]])
    states = np.arange(start + 1 - len(added), stop + (stop == end))
    positions = states + (tokens.position_starts[document] - first)
    return Line(line, targets - start + len(added), targets, positions)


def require_trained_engine(engine: Engine, probe: Sequence[int]) -> None:
    """Check that a teacher knows the plain text `probe`, as in `require_trained`."""
    length = min(len(probe), engine.rule.teacher_seq_length - 1)
    whole = np.array([0, length], np.int64)
    zero = np.zeros(1, np.int64)
    pieces = Pieces(zero, zero, whole[1:], np.zeros(1, np.bool_))
    scored = engine.score(DocumentTokens(np.array(probe[:length], np.int64), whole), pieces)
    require_trained(float(np.nanmean(scored.losses)), engine.vocab_size)
