"""How much disk a dataset without its removed documents takes, before it is written."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from beam_jobs import storage
from beam_jobs.edit.carried import Carried
from beam_jobs.shortages import require_room
from pipeline.dataset.encoding import TAR_BLOCK
from pipeline.drawing.formatting import format_bytes

_READ_AT_ONCE = 8


def estimate_disk(carried: Carried) -> int:
    """Return about how many bytes the new dataset has, card and tokenizers left out.

    Of the tars it is exact; indices, views and losses lose the share that their tar loses.

    Raises:
        DamagedShardError: an index is missing or is not the manifest's.

    Example:
        >>> estimate_disk(find_carried(open_dataset("aligned"))) // 10**9  # doctest: +SKIP
        120
    """
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return sum(pool.map(lambda number: _estimate_shard(carried, number), carried.numbers))


def require_disk(output: str, carried: Carried) -> None:
    """Check that a local output's disk has room, with what an earlier attempt has written there.

    Raises:
        OptionsError: it has not.
    """
    if not storage.is_local(output):
        return
    need, prefix = estimate_disk(carried), f"{carried.dataset.manifest.name}-"
    found = storage.list_folder(output)
    require_room(
        output,
        need,
        f"--output {output} has {{room}} of free disk, and the dataset will take about "
        f"{format_bytes(need)} there",
        remedy="free some, or choose another --output",
        least=0.95,
        ample=1.05,
        there=sum(num_bytes for name, num_bytes in found.items() if name.startswith(prefix)),
    )


def _estimate_shard(carried: Carried, number: int) -> int:
    shard = carried.dataset.manifest.shards[number]
    beside = shard.index_num_bytes
    for seen in carried.views_of(number):
        assert seen.view is not None
        file = seen.view.files[number]
        beside += file.num_bytes + file.index_num_bytes
    sidecars = [s.files.manifest.sidecars[number] for s in carried.scores_of(number)]
    beside += sum(record.num_bytes for record in sidecars)
    removed = carried.dataset.removed_of(number)
    if not len(removed):
        return shard.num_bytes + beside
    sizes = carried.dataset.read_index(number).payload_bytes[removed]
    members = TAR_BLOCK + -(-sizes // TAR_BLOCK) * TAR_BLOCK
    left = shard.num_bytes - int(np.sum(members))
    return left + beside * left // shard.num_bytes
