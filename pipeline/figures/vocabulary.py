"""How much of each teacher's vocabulary the student has (paper, Fig. 1)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.drawing.charts import bar_chart
from pipeline.drawing.formatting import format_count, format_table
from pipeline.tokenization import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def vocabulary_overlap(student_pieces: Iterable[str], teacher_pieces: Iterable[str]) -> float:
    """Return the share of the teacher's vocabulary that is in the student's, |S ∩ T| / |T|.

    Example:
        >>> vocabulary_overlap(["a", "b"], ["b", "c"])
        0.5

    Source: Fig. 1, over raw token strings; pass decoded bytes for the more honest figure, which
    does not count `▁the` and `Ġthe` as different.
    """
    teacher = set(teacher_pieces)
    return len(teacher & set(student_pieces)) / max(len(teacher), 1)


def compare_vocabularies(student: Tokenizer, teacher: Tokenizer) -> tuple[float, float]:
    """Return vocabulary_overlap by raw token strings and by the bytes that tokens stand for.

    Both over base vocabularies, without added tokens.
    """
    ours, theirs = student.base_vocabulary(), teacher.base_vocabulary()
    decoded = ([spelled.hex() for spelled in side.values() if spelled] for side in (ours, theirs))
    return vocabulary_overlap(ours, theirs), vocabulary_overlap(*decoded)
