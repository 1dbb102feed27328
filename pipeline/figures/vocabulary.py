"""The share of teachers' vocabularies that the student has (paper, Fig. 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING

from pipeline.drawing.charts import bar_chart
from pipeline.drawing.formatting import format_count, format_table
from pipeline.tokenization import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class VocabularyOverlap:
    """Shares (0 to 1) of a teacher's vocabulary that the student has.

    `raw` counts equal token strings, `decoded` equal bytes; NaN if tokens have none.
    """

    teacher: str
    num_tokens: int
    raw: float
    decoded: float


def measure_overlaps(
    student: Tokenizer, teachers: Mapping[str, Tokenizer]
) -> list[VocabularyOverlap]:
    """Compare vocabularies without added tokens, by strings and by bytes.

    As bytes, `▁the` and `Ġthe` are equal.

    Source: Fig. 1, |S ∩ T| / |T|.
    """
    ours, found = student.base_vocabulary(), []
    for name, teacher in teachers.items():
        theirs = teacher.base_vocabulary()
        our_bytes, their_bytes = (set(filter(None, side.values())) for side in (ours, theirs))
        raw = len(ours.keys() & theirs.keys()) / max(len(theirs), 1)
        is_known = our_bytes and their_bytes  # WordPiece's tokens don't spell bytes
        decoded = len(our_bytes & their_bytes) / len(their_bytes) if is_known else nan
        found.append(VocabularyOverlap(name, len(theirs), raw, decoded))
    return found


def describe_overlaps(student: str, overlaps: Sequence[VocabularyOverlap]) -> Iterator[str]:
    """Yield a table for the terminal."""
    yield f"Share of each teacher's vocabulary that {student} has"
    rows = [["teacher", "tokens", "as token strings", "as decoded bytes"]]
    rows += [
        [o.teacher, format_count(o.num_tokens), *map(_percent, (o.raw, o.decoded))]
        for o in overlaps
    ]
    yield from format_table(rows, align="<>>>")
    yield (
        "Strings are the files' own spellings (`▁the` and `Ġthe` differ); bytes are what a token "
        "stands for. Added tokens are left out."
    )


def _percent(share: float) -> str:
    return "unknown" if isnan(share) else f"{100 * share:.2f} %"


def draw_overlaps(student: str, overlaps: Sequence[VocabularyOverlap]) -> "Figure":
    """Return the chart."""
    return bar_chart(
        f"Share of each teacher's vocabulary that {student} has",
        [overlap.teacher for overlap in overlaps],
        {
            "as token strings (Fig. 1)": [overlap.raw for overlap in overlaps],
            "as decoded bytes": [overlap.decoded for overlap in overlaps],
        },
        x_label="teacher",
        y_label="share of its vocabulary",
    )
