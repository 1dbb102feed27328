"""Where all student ranks wait for a step's losses.

Only the leaders of the replicas talk to the teacher. Were the others to go on, they would wait for
the leaders in Megatron's own collectives, whose timeout (`--distributed-timeout-minutes`) knows
nothing of a teacher: one that is slow would end a tensor- or pipeline-parallel student.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from torch import distributed as dist

from megatron_plugin.bridge import peer
from megatron_plugin.student.batch import MicroBatch


class StudentMeeting:
    """A CPU group of all student ranks; its timeout is the sum of the job's two.

    So neither has to be longer than the other: ranks may come one after the other for as long as
    Megatron lets them, the leader may wait its time for losses then, and is still the first to end.

    Ranks connect when they first talk to each other. gloo otherwise connects all with all at once;
    a barrier needs one rank's connections only, a star (docs/megatron.md has figures of both).
    """

    def __init__(
        self, store: dist.Store, *, teacher_minutes: float, distributed_minutes: float
    ) -> None:
        """Make the group; every student rank does.

        Args:
            store: that all of them see.
            teacher_minutes: that a leader waits for losses; then it ends the job, and says why.
            distributed_minutes: that ranks may be apart when they come here, one saving a
                checkpoint, another done with its part.
        """
        self._timeout = timedelta(minutes=teacher_minutes + distributed_minutes)
        # torch's stubs leave the options out.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
        options._timeout = self._timeout
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("meeting", store), dist.get_rank(), dist.get_world_size(), options
        )

    def wait(self) -> None:
        """Return when every student rank is here.

        Raises:
            BridgeError: one of them is gone or silent.
        """
        what = f"student rank {dist.get_rank()} waited for the leaders that ask over the bridge;"
        with peer("the teacher", what):
            # torch's stubs leave out a backend's own collectives.
            self._group.monitored_barrier(self._timeout)  # type: ignore[attr-defined]


def meet_before_steps(
    batches: Iterator[MicroBatch], meeting: StudentMeeting, num_microbatches: int
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a rank that asks for no losses; wait before each step's first."""
    for number, batch in enumerate(batches):
        if number % num_microbatches == 0:
            meeting.wait()
        yield batch
