"""Splits of a job's ranks between equally efficient student and teacher."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from megatron_plugin.bridge import Pairing
from megatron_plugin.models.shape import ModelShape


@dataclass(frozen=True)
class Batch:
    """A step's rows, and micro-batches of either model's copies.

    `ranks_of_student` and `ranks_of_teacher` share one copy; messages call the step `what`.
    """

    rows: int
    micro_batch_size: int
    teacher_micro_batch_size: int = 1
    ranks_of_student: int = 1
    ranks_of_teacher: int = 1
    what: str = "a training step"

    def refusal(self, student_ranks: int, teacher_ranks: int) -> str | None:
        """Return why these ranks can't share the rows evenly, or None.

        Without teacher ranks the teacher is colocated.
        """
        students, teachers = self._replicas(student_ranks, teacher_ranks)
        together = students * self.micro_batch_size
        if self.rows % together:
            return (
                f"{self.what} has {self.rows} rows, which {students} student replicas can't share "
                f"in micro-batches of {self.micro_batch_size}: change --micro-batch-size, or the "
                f"batch size to a multiple of {together} rows"
            )
        try:
            parts = self._parts(students, teachers)
        except ValueError as error:
            return str(error)
        rows, shared = self.rows // students, parts * self.teacher_micro_batch_size
        if rows % shared:
            return (
                f"{self.what} has {rows} rows per student replica, which {parts} teacher replicas "
                f"can't share in micro-batches of {self.teacher_micro_batch_size}: change "
                f"--vocag-teacher-micro-batch-size, or the batch size to a multiple of {shared} "
                f"rows per student replica ({shared * students} in all)"
            )
        return None

    def fitting_rows(self, student_ranks: int, teacher_ranks: int) -> list[int]:
        """Return the nearest numbers of rows that the split can share."""
        students, teachers = self._replicas(student_ranks, teacher_ranks)
        try:
            parts = self._parts(students, teachers)
        except ValueError:
            return []
        unit = students * lcm(self.micro_batch_size, parts * self.teacher_micro_batch_size)
        below = self.rows // unit * unit
        return [rows for rows in (below, below + unit) if rows]

    def _replicas(self, student_ranks: int, teacher_ranks: int) -> tuple[int, int]:
        return student_ranks // self.ranks_of_student, teacher_ranks // self.ranks_of_teacher

    def _parts(self, students: int, teachers: int) -> int:
        return len(Pairing(students, teachers).teachers_of(0)) if teachers else 1


@dataclass(frozen=True)
class Split:
    """A split, with its speed as a share of a colocated job's."""

    student_ranks: int
    teacher_ranks: int
    share: float

    def __str__(self) -> str:
        return f"{self.student_ranks} + {self.teacher_ranks} ({self.share:.2f})"


def balance(student: ModelShape, teacher: ModelShape, teacher_tokens: float) -> float:
    """Return the teacher ranks per student rank at which neither waits.

    A weight takes six operations in the student's passes, two in the teacher's, on `teacher_tokens`
    per student token.
    """
    return teacher_tokens * teacher.weights_per_token / (3 * student.weights_per_token)


def legal_splits(num_ranks: int, batch: Batch, ratio: float) -> list[Split]:
    """Return the splits that can share a batch, the fastest first; `ratio` is from `balance`."""
    return sorted(
        _legal(num_ranks, batch, ratio),
        key=lambda split: (-split.share, split.student_ranks + split.teacher_ranks),
    )


def _legal(num_ranks: int, batch: Batch, ratio: float) -> Iterator[Split]:
    sizes, teacher_sizes = batch.ranks_of_student, batch.ranks_of_teacher
    for student in range(sizes, num_ranks, sizes):
        for teacher in range(teacher_sizes, num_ranks - student + 1, teacher_sizes):
            if batch.refusal(student, teacher) is None:
                slower = max(1 / student, ratio / teacher)
                yield Split(student, teacher, (1 + ratio) / num_ranks / slower)


def best_of_each(splits: list[Split], count: int) -> list[Split]:
    """Return the best split per student size."""
    best: dict[int, Split] = {}
    for split in splits:
        best.setdefault(split.student_ranks, split)
    return list(best.values())[:count]
