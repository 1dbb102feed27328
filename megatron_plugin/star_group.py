"""A gloo group that connects as it goes."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist


def star_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """Return a CPU group whose ranks connect when they first talk to each other.

    gloo otherwise connects all ranks with all others at once. A barrier needs one rank's
    connections with the others only: a star (docs/megatron.md has figures of both).

    Args:
        store: that its ranks see, and no others.
        rank: of this process.
        size: ranks.
        timeout: of its operations.

    Example:
        >>> group = star_group(dist.HashStore(), 0, 1, timedelta(minutes=1))
        >>> group.monitored_barrier(timedelta(minutes=1))
    """
    # torch's stubs leave the options out.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)
