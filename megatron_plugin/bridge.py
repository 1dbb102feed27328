"""The bridge between the worlds: teacher tokens one way, losses the other, over CPU and gloo.

Each student replica's leader (last pipeline stage, first rank of those that share rows or layers)
is connected to the leaders of the teacher replicas that serve it.

    request   int64 [4]: kind, rows, places per row, bounds per row;
              then int32 [rows, places + bounds]
    reply     float32 [rows, places, 1 + 2 K], see `TeacherAnswer`
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist

from pipeline.command_line.failures import hinted

logger = logging.getLogger(__name__)

Role = Literal["student", "teacher"]
_ENDS: tuple[Role, Role] = ("student", "teacher")
_HEADER, _REQUEST, _REPLY = 0, 1, 2
_STOP, _SCORE = 0, 1
IDLE_TIMEOUT = timedelta(days=7)  # a teacher waits while the student validates, saves or compiles
START_TIMEOUT = timedelta(minutes=30)  # the other world loads its weights
_GRACE_SECONDS = 5.0
_RAISE_TIMEOUT = "--distributed-timeout-minutes 60"
_RAISE_LATER_TIMEOUT = "--distributed-timeout-seconds-after-init 3600"


class BridgeError(RuntimeError):
    """The other world is gone or silent."""


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's side of some rows.

    Attributes:
        input_ids: int32 [rows, teacher_seq_length].
        cu_seqlens: int32 [rows, bounds], padded with teacher_seq_length.
    """

    input_ids: Tensor
    cu_seqlens: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def share(self, part: int, num_parts: int) -> TeacherRows:
        """Return one of equal parts, of consecutive rows."""
        size = len(self) // num_parts
        rows = slice(part * size, (part + 1) * size)
        return TeacherRows(self.input_ids[rows], self.cu_seqlens[rows])


@dataclass(frozen=True)
class TeacherAnswer:
    """A teacher's answer for some rows, with K next tokens.

    Attributes:
        values: float32 [rows, teacher_seq_length, 1 + 2 K].
    """

    values: Tensor

    @property
    def losses(self) -> Tensor:
        """Losses, float32 [rows, teacher_seq_length], nats; NaN without context."""
        return self.values[..., 0]

    @property
    def next_ids(self) -> Tensor:
        """Tokens after each token, float32 [rows, teacher_seq_length, K], exact below 2^24.

        Draws are the last, after -1 for the text's own token.
        """
        return self.values[..., 1 : 1 + self.values.shape[-1] // 2]

    @property
    def next_log_probs(self) -> Tensor:
        """Log-probabilities of `next_ids`, nats; draws: -inf."""
        return self.values[..., 1 + self.values.shape[-1] // 2 :]


@dataclass(frozen=True)
class Pairing:
    """Which replicas serve which, with equally many partners each."""

    num_students: int
    num_teachers: int

    def __post_init__(self) -> None:
        many, few = sorted((self.num_students, self.num_teachers), reverse=True)
        if many % few:
            raise ValueError(
                f"{self.num_students} student replicas can't be served evenly by "
                f"{self.num_teachers} teacher replicas: change --vocag-teacher-world-size so that "
                "one number divides the other"
            )

    def teachers_of(self, student: int) -> list[int]:
        """Return the teacher replicas of a student replica."""
        if self.num_teachers <= self.num_students:
            return [student % self.num_teachers]
        return list(range(student, self.num_teachers, self.num_students))

    def students_of(self, teacher: int) -> list[int]:
        """Return the student replicas of a teacher replica."""
        return [s for s in range(self.num_students) if teacher in self.teachers_of(s)]


class _Link:
    """A connection of two leaders; a group of hundreds would take minutes to connect."""

    def __init__(self, store: dist.Store, *, student: int, teacher: int, end: Role) -> None:
        rank = _ENDS.index(end)
        own = dist.PrefixStore(f"bridge/{student}-{teacher}", store)
        self._group = dist.ProcessGroupGloo(own, rank, len(_ENDS), START_TIMEOUT)
        self._other = 1 - rank

    # torch's stubs leave out a backend's own messages.
    def send(self, tensor: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._group.send([tensor], self._other, tag)  # type: ignore[attr-defined]
        return work

    def receive(self, tensor: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._group.recv([tensor], self._other, tag)  # type: ignore[attr-defined]
        return work


class StudentBridge:
    """The student's end: requests ahead, takes replies in order.

    `BridgeError` for a lost or silent teacher.
    """

    def __init__(
        self,
        store: dist.Store,
        pairing: Pairing,
        *,
        replica: int,
        timeout: timedelta,
        later_timeout: timedelta | None = None,
        width: int = 0,
    ) -> None:
        """Wait until this replica's teachers have connected.

        Answers after the first may take `later_timeout`; None: as long as the first.
        """
        self._timeout = timeout
        self._later_timeout = later_timeout
        self._raise_timeout = _RAISE_TIMEOUT
        self._num_values = 1 + 2 * width
        self._replica = replica
        self._served_by = pairing.teachers_of(replica)
        with self._peer("waited to connect to"):
            self._links = [
                _Link(store, student=replica, teacher=teacher, end="student")
                for teacher in self._served_by
            ]

    def _peer(self, what: str) -> AbstractContextManager[None]:
        names = f"teacher replica {', '.join(map(str, self._served_by))}"
        what = f"student replica {self._replica} {what} {names};"
        return _peer("the teacher", what, self._raise_timeout)

    def request(self, rows: TeacherRows) -> Callable[[], TeacherAnswer]:
        """Send a request; return a function that waits for the answer."""
        sends, replies = [], []
        for part, link in enumerate(self._links):
            share = rows.share(part, len(self._links))
            num_rows, places = share.input_ids.shape
            header = torch.tensor([_SCORE, num_rows, places, share.cu_seqlens.shape[1]])
            payload = torch.cat((share.input_ids, share.cu_seqlens), 1).contiguous()
            with self._peer("asked"):
                sends.append((link.send(header, _HEADER), header))
                sends.append((link.send(payload, _REQUEST), payload))
                reply = torch.empty(num_rows, places, self._num_values)
                replies.append((link.receive(reply, _REPLY), reply))

        def wait() -> TeacherAnswer:
            with self._peer(f"waited {self._timeout.total_seconds() / 60:g} minutes at most for"):
                # Only `wait` ends a send of gloo's; answered, it has arrived.
                for work, _ in (*replies, *sends):
                    work.wait(self._timeout)
            if self._later_timeout is not None:
                self._timeout, self._raise_timeout = self._later_timeout, _RAISE_LATER_TIMEOUT
            return TeacherAnswer(torch.cat([values for _, values in replies]))

        return wait

    def close(self) -> None:
        """Announce the end of requests."""
        for link in self._links:
            with self._peer("said good-bye to"):
                header = torch.tensor([_STOP, 0, 0, 0])
                link.send(header, _HEADER).wait(self._timeout)


class TeacherBridge:
    """The teacher's end: takes one request of each student replica at a time.

    `BridgeError` for a lost student.
    """

    def __init__(self, store: dist.Store, pairing: Pairing, *, replica: int) -> None:
        """Wait until this replica's students have connected."""
        self._links: dict[int, _Link] = {}
        for student in pairing.students_of(replica):
            what = f"teacher replica {replica} waited for student replica {student} to connect;"
            with _peer("the student", what):
                link = _Link(store, student=student, teacher=replica, end="teacher")
            self._links[student] = link
        self._asking: list[int] = []

    def receive(self) -> list[TeacherRows]:
        """Return each student replica's next request; empty when all have closed."""
        requests, self._asking = [], []
        for student, link in list(self._links.items()):
            with _peer("the student", f"the teacher waited for student replica {student};"):
                header = torch.empty(4, dtype=torch.int64)
                link.receive(header, _HEADER).wait(IDLE_TIMEOUT)
                kind, num_rows, places, bounds = header.tolist()
                if kind == _STOP:
                    del self._links[student]
                    continue
                payload = torch.empty((num_rows, places + bounds), dtype=torch.int32)
                link.receive(payload, _REQUEST).wait(IDLE_TIMEOUT)
            requests.append(TeacherRows(payload[:, :places], payload[:, places:]))
            self._asking.append(student)
        return requests

    def reply(self, replies: Sequence[Tensor]) -> None:
        """Answer the requests of `receive`, in order."""
        for student, values in zip(self._asking, replies, strict=True):
            message = values.contiguous().cpu()
            with _peer("the student", f"the teacher answered student replica {student};"):
                self._links[student].send(message, _REPLY).wait(IDLE_TIMEOUT)


@contextmanager
def _peer(name: str, what: str, raise_timeout: str = _RAISE_TIMEOUT) -> Iterator[None]:
    """Turn gloo's errors into ours, after torchrun has had time to report the cause."""
    try:
        yield
    except RuntimeError as error:
        # A signal handler may raise here, too, if a reader died.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        logger.error("lost the bridge to %s: %s %s", name, what, error)
        # Peers notice a dead process before torchrun, which reports the first process to end.
        time.sleep(_GRACE_SECONDS)
        refusal = BridgeError(
            f"{name} doesn't answer over the bridge: {what} {error}; the messages of {name}'s own "
            f"ranks say why; raise {raise_timeout.split()[0]} if it was only slow"
        )
        raise hinted(refusal, raise_timeout) from error
