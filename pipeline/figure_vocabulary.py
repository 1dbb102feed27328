"""How much of each teacher's vocabulary the student has (paper, Fig. 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from pipeline.figure_charts import bar_chart
from pipeline.formatting import format_count, format_table
from pipeline.quality import compare_vocabularies
from pipeline.tokenization import Tokenizer


@dataclass(frozen=True)
class VocabularyOverlap:
    """What one teacher shares with the student.

    Attributes:
        teacher: its name.
        num_tokens: its base vocabulary, without added tokens.
        raw: share of it that the student has as the same token string, 0 to 1.
        decoded: share of the bytes that its tokens stand for, 0 to 1.
    """

    teacher: str
    num_tokens: int
    raw: float
    decoded: float


def measure_overlaps(
    student: Tokenizer, teachers: Mapping[str, Tokenizer]
) -> list[VocabularyOverlap]:
    """Compare the student's vocabulary with each teacher's.

    Example:
        >>> measure_overlaps(llama2, {"qwen2_5": qwen2_5})[0].raw
        0.0632

    Source: Fig. 1, |S ∩ T| / |T|.
    """
    return [
        VocabularyOverlap(
            name, len(teacher.base_vocabulary()), *compare_vocabularies(student, teacher)
        )
        for name, teacher in teachers.items()
    ]


def describe_overlaps(student: str, overlaps: Sequence[VocabularyOverlap]) -> Iterator[str]:
    """Yield a table for the terminal."""
    yield f"Share of each teacher's vocabulary that {student} has"
    rows = [["teacher", "tokens", "as token strings", "as decoded bytes"]]
    rows += [
        [o.teacher, format_count(o.num_tokens), f"{100 * o.raw:.2f} %", f"{100 * o.decoded:.2f} %"]
        for o in overlaps
    ]
    yield from format_table(rows, align="<>>>")
    yield (
        "Strings are the files' own spellings (`▁the` and `Ġthe` differ); bytes are what a token "
        "stands for. Added tokens are left out."
    )


def draw_overlaps(student: str, overlaps: Sequence[VocabularyOverlap]) -> Element:
    """Return the chart."""
    return bar_chart(
        f"Share of each teacher's vocabulary that {student} has",
        [overlap.teacher for overlap in overlaps],
        {
            "as token strings (Fig. 1)": [100 * overlap.raw for overlap in overlaps],
            "as decoded bytes": [100 * overlap.decoded for overlap in overlaps],
        },
    )
