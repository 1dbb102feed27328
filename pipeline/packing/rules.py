"""The lengths of rows, and the tokens around texts."""

import json
from dataclasses import asdict, astuple, dataclass, replace
from hashlib import sha256

from pipeline.command_line.option_parsing import require_least
from schemas.manifest import ConventionRecord, Manifest, generation_of

_LENGTH_STEP = 64


@dataclass(frozen=True)
class PackingRules:
    """All that determines a plan, apart from the dataset.

    `student` and `teacher` are the tokens around texts; they count towards a row's length. Rows are
    packed `window_rows` at a time: more leave less padding, but spread a row over more shards.
    ValueError for impossible numbers.
    """

    seq_length: int
    teacher_seq_length: int
    student: ConventionRecord
    teacher: ConventionRecord
    window_rows: int = 1024
    one_document_a_row: bool = False

    def __post_init__(self) -> None:
        for name in ("seq_length", "teacher_seq_length"):
            value = getattr(self, name)
            if not 4 <= value < 1 << 31:
                raise ValueError(f"{name} {value} is not in 4 … 2**31 - 1; 2048 is usual")
        require_least(self, "window_rows")

    @classmethod
    def of_dataset(
        cls,
        manifest: Manifest,
        *,
        seq_length: int,
        teacher_seq_length: int | None = None,
        window_rows: int = 1024,
        one_document_a_row: bool = False,
    ) -> "PackingRules":
        """Return rules with a manifest's tokens around texts.

        Only student documents get an end token. `teacher_seq_length` None takes
        `suggest_teacher_seq_length`.
        """
        if teacher_seq_length is None:
            teacher_seq_length = suggest_teacher_seq_length(manifest, seq_length)
        return cls(
            seq_length=seq_length,
            teacher_seq_length=teacher_seq_length,
            student=manifest.student.around_text,
            teacher=replace(manifest.teacher.around_text, end_token_id=None),
            window_rows=window_rows,
            one_document_a_row=one_document_a_row,
        )

    @property
    def student_room(self) -> tuple[int, int, int, int]:
        """Tokens per row, and those added before a text, a continuation, and at the end."""
        return (self.seq_length, *_num_added(self.student))

    @property
    def teacher_room(self) -> tuple[int, int, int, int]:
        """The same for the teacher."""
        return (self.teacher_seq_length, *_num_added(self.teacher))

    @property
    def fingerprint(self) -> str:
        """64 hex digits, equal for equal rules."""
        named = asdict(self)
        if not self.one_document_a_row:  # of runs that began before there was this choice
            del named["one_document_a_row"]
        return sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _num_added(around: ConventionRecord) -> tuple[int, int, int]:
    first, continued, end = (int(token is not None) for token in astuple(around))
    return first, continued, end


def suggest_teacher_seq_length(manifest: Manifest, seq_length: int) -> int:
    """Return a teacher length at which the student's tokens fill the rows.

    12.5 % above the mean (`teacher_share`), rounded up to a multiple of 64. Longer costs teacher
    padding, shorter student padding.
    """
    ratio = teacher_share(manifest)
    return max(1, -int(-seq_length * ratio * 1.125 // _LENGTH_STEP)) * _LENGTH_STEP


def teacher_share(manifest: Manifest) -> float:
    """Return the teacher tokens per student token of a dataset's first generation.

    Constant while a dataset grows, so stored losses stay valid.
    """
    shards = manifest.shards
    first = [shard for shard in shards if not generation_of(shard.file, name=manifest.name)]
    if not any(shard.num_student_tokens for shard in first):
        first = list(shards)
    student = sum(shard.num_student_tokens for shard in first)
    return sum(shard.num_teacher_tokens for shard in first) / max(1, student)
