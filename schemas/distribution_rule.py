"""Rules of stored distributions, without numpy, which options and help avoid."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

MOST_ENTRIES = 255
DRAWS = 4
"""The default: draws taught better than a bin of the rest, see evidence/distributions.md."""
_BYTES = {"uint8": 1, "float16": 2}


@dataclass(frozen=True)
class EntryShape:
    """Columns for next tokens at a place.

    Attributes:
        exact: the first, with their own probabilities: each averaged teacher's likeliest and the
            text's own next token.
        drawn: the last, draws from all others, which share the remaining mass.
    """

    exact: int
    drawn: int = 0

    @property
    def width(self) -> int:
        """All columns."""
        return self.exact + self.drawn


NO_ENTRIES = EntryShape(0)


@dataclass(frozen=True)
class DistributionRule:
    """The stored part of a teacher's distributions.

    Attributes:
        top_k: most entries per position.
        top_mass: fewer if the likeliest hold this mass.
        vocab_size: of the dataset's teacher tokenizer; larger ids have no entries.
        log_probs: storage; "uint8" code c is -20 (c / 255)² nats.
        draws: tokens drawn per position, except entries and the text's own next token.
        draws_seed: of the draws.
        entropy_above: nats; positions whose `least_entropies` aren't above have no entries.
    """

    top_k: Annotated[int, Meta(ge=1, le=MOST_ENTRIES)]
    top_mass: Annotated[float, Meta(gt=0, le=1)]
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 31)]
    log_probs: Literal["uint8", "float16"]
    draws: Annotated[int, Meta(ge=0, le=MOST_ENTRIES)] = 0
    draws_seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    entropy_above: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def shape(self) -> EntryShape:
        """A position's columns, the text's own next token included."""
        return EntryShape(self.top_k + 1, self.draws)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without unused draws and entropies."""
        without: tuple[str, ...] = () if self.draws else ("draws", "draws_seed")
        if not self.entropy_above:
            without += ("entropy_above",)
        return {name: value for name, value in asdict(self).items() if name not in without}

    @property
    def id_bits(self) -> int:
        """Bits per stored id."""
        return max(1, (self.vocab_size - 1).bit_length())

    def describe(self) -> str:
        """Return the rule in words."""
        mass = f" up to {self.top_mass:g} of the mass" if self.top_mass < 1 else ""
        draws = f" and {self.draws} draws of the rest" if self.draws else ""
        where = f", where their entropy is above {self.entropy_above:g}" * bool(self.entropy_above)
        return f"the likeliest {self.top_k} tokens{mass}{draws} in {self.log_probs}{where}"

    @property
    def entry_bytes(self) -> float:
        """Bytes per entry."""
        return self.id_bits / 8 + _BYTES[self.log_probs]

    @property
    def draws_bytes(self) -> float:
        """Bytes of a position's draws."""
        return self.draws * self.id_bits / 8
