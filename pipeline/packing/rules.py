"""What a row is: its lengths, and the tokens that stand around a text."""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256

from schemas.manifest import Manifest, TokenizerRecord, generation_of

_LENGTH_STEP = 64


@dataclass(frozen=True)
class Convention:
    """The tokens that a model expects around a text; they count towards a row's length.

    Attributes:
        first_token_id: put before a document's first token, None for nothing. With it the first
            token of the text is predicted too; without it that token has no loss.
        continued_token_id: put before a segment that continues a document.
        end_token_id: put after a document's last token.
    """

    first_token_id: int | None = None
    continued_token_id: int | None = None
    end_token_id: int | None = None

    @classmethod
    def of_tokenizer(cls, tokenizer: TokenizerRecord, *, ends: bool) -> "Convention":
        """Return a dataset's convention for one side, see `TokenizerRecord.around_text`.

        Args:
            tokenizer: one side of the manifest.
            ends: whether a document's last token is followed by the end-of-document token: True
                for a student, which learns to stop.

        Example:
            >>> Convention.of_tokenizer(manifest.student, ends=True)
            Convention(first_token_id=1, continued_token_id=1, end_token_id=2)
        """
        own = tokenizer.around_text
        return cls(own.first_token_id, own.continued_token_id, own.end_token_id if ends else None)

    @property
    def added_tokens(self) -> tuple[int, int, int]:
        """How many tokens are added (0 or 1): first, continued, end."""
        ids = (self.first_token_id, self.continued_token_id, self.end_token_id)
        first, continued, end = (int(token is not None) for token in ids)
        return first, continued, end


@dataclass(frozen=True)
class PackingRules:
    """What determines a plan, apart from the dataset.

    Attributes:
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row.
        student: the student's convention.
        teacher: the teacher's convention.
        window_rows: rows' worth of student tokens that are packed together. More rows leave less
            padding and spread a row over more shards.

    Raises:
        ValueError: a length that has no room for text.
    """

    seq_length: int
    teacher_seq_length: int
    student: Convention
    teacher: Convention
    window_rows: int = 1024

    def __post_init__(self) -> None:
        """Check the lengths."""
        for name in ("seq_length", "teacher_seq_length"):
            value = getattr(self, name)
            if not 4 <= value < 1 << 31:
                raise ValueError(f"{name} {value} is not in 4 … 2**31 - 1; 2048 is usual")
        if self.window_rows < 1:
            raise ValueError(f"window_rows {self.window_rows} is below 1; 1024 is usual")

    @classmethod
    def of_dataset(
        cls,
        manifest: Manifest,
        *,
        seq_length: int,
        teacher_seq_length: int | None = None,
        student: Convention | None = None,
        teacher: Convention | None = None,
        window_rows: int = 1024,
    ) -> "PackingRules":
        """Return the rules for a dataset, with its own defaults for what is None.

        Args:
            manifest: the dataset's; it says which tokens stand around a text.
            seq_length: student tokens per row.
            teacher_seq_length: teacher tokens per row, see `suggest_teacher_seq_length`.
            student: the student's convention.
            teacher: the teacher's convention.
            window_rows: see the class.

        Raises:
            ValueError: a length that has no room for text.

        Example:
            >>> PackingRules.of_dataset(manifest, seq_length=2048).teacher_seq_length
            1984
        """
        return cls(
            seq_length=seq_length,
            teacher_seq_length=teacher_seq_length
            or suggest_teacher_seq_length(manifest, seq_length),
            student=student or Convention.of_tokenizer(manifest.student, ends=True),
            teacher=teacher or Convention.of_tokenizer(manifest.teacher, ends=False),
            window_rows=window_rows,
        )

    @property
    def student_room(self) -> tuple[int, int, int, int]:
        """Student tokens per row, and tokens added first, continued and at the end."""
        return (self.seq_length, *self.student.added_tokens)

    @property
    def teacher_room(self) -> tuple[int, int, int, int]:
        """The same for the teacher."""
        return (self.teacher_seq_length, *self.teacher.added_tokens)

    @property
    def fingerprint(self) -> str:
        """64 hex digits; equal rules have equal fingerprints."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def suggest_teacher_seq_length(manifest: Manifest, seq_length: int) -> int:
    """Return a teacher length with which rows are filled by the student's tokens.

    It is the dataset's mean ratio of teacher to student tokens (`teacher_share`) with 12.5 % to
    spare, rounded up to a multiple of 64. Too long costs teacher padding, too short costs student
    padding.

    Example:
        >>> suggest_teacher_seq_length(manifest, 2048)
        1984
    """
    ratio = teacher_share(manifest)
    return max(1, -int(-seq_length * ratio * 1.125 // _LENGTH_STEP)) * _LENGTH_STEP


def teacher_share(manifest: Manifest) -> float:
    """Return a dataset's teacher tokens by its student tokens, of the shards that it began with.

    A dataset that grows keeps it, and with it the length of rows: stored losses stay of use, and
    runs on its generations comparable.
    """
    shards = manifest.shards
    first = [shard for shard in shards if not generation_of(shard.file, name=manifest.name)]
    if not any(shard.num_student_tokens for shard in first):
        first = list(shards)
    student = sum(shard.num_student_tokens for shard in first)
    return sum(shard.num_teacher_tokens for shard in first) / max(1, student)
