"""What goes from a dataset into the one without its removed documents: shards, views and losses."""

from collections.abc import Mapping
from dataclasses import dataclass

from beam_jobs import storage
from beam_jobs.edit.losses import Scores, copy_losses, find_losses, find_unlisted
from beam_jobs.edit.shards import copy_shard
from beam_jobs.edit.views import copy_view, see_views
from beam_jobs.runs import read_commit
from pipeline.dataset.files import Dataset
from pipeline.drawing.formatting import format_plural
from schemas.manifest import ShardRecord, ViewFileRecord
from schemas.records import Sha256, write_record
from schemas.sidecar import SidecarRecord, score_manifest_name


@dataclass(frozen=True)
class Carried:
    """Everything that is copied, in whole or in part.

    Attributes:
        dataset: the old one.
        numbers: of its shards that have a document left; of all, where none has.
        views: the dataset through each view that has files of one of them.
        scores: of teachers that have scored one of them.
        remarks: what is not copied, or not to its end, a line each.
    """

    dataset: Dataset
    numbers: tuple[int, ...]
    views: tuple[Dataset, ...]
    scores: tuple[Scores, ...]
    remarks: tuple[str, ...]

    def views_of(self, number: int) -> list[Dataset]:
        """Return the views that a shard has."""
        return [seen for seen in self.views if number < len(seen.manifest.shards)]

    def scores_of(self, number: int) -> list[Scores]:
        """Return the scores that a shard has."""
        return [scores for scores in self.scores if number < scores.num_shards]

    def files_of(self, number: int) -> tuple[str, ...]:
        """Return the SHA-256 of all that is copied of a shard, as the old manifests say."""
        shard = self.dataset.manifest.shards[number]
        digests = [shard.sha256, shard.index_sha256]
        for seen in self.views_of(number):
            assert seen.view is not None
            record = seen.view.files[number]
            digests += [record.sha256, record.index_sha256]
        sidecars = [s.files.manifest.sidecars[number] for s in self.scores_of(number)]
        return (*digests, *(record.sha256 for record in sidecars))

    def complete_scores(self) -> list[Scores]:
        """Return the scores that every shard has."""
        return [
            scores
            for scores in self.scores
            if all(number < scores.num_shards for number in self.numbers)
        ]


@dataclass(frozen=True)
class CopiedShard:
    """A shard of the new dataset, and what stands beside it.

    Attributes:
        shard: its tar and index.
        views: by the view's name.
        losses: by the fingerprint of the `TeacherRule`.
        made_of: SHA-256 of each file that it was copied from, see `Carried.files_of`.
    """

    shard: ShardRecord
    views: Mapping[str, ViewFileRecord]
    losses: Mapping[str, SidecarRecord]
    made_of: tuple[Sha256, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each of its files, by name."""
        sizes = {record.file: record.num_bytes for record in self._records}
        indexed: tuple[ShardRecord | ViewFileRecord, ...] = (self.shard, *self.views.values())
        return sizes | {record.index_file: record.index_num_bytes for record in indexed}

    @property
    def _records(self) -> tuple[ShardRecord | ViewFileRecord | SidecarRecord, ...]:
        return (self.shard, *self.views.values(), *self.losses.values())


def find_carried(dataset: Dataset) -> Carried:
    """Return what there is to copy of a dataset.

    Raises:
        DatasetError: the list of removed documents, or a score manifest, is damaged.

    Example:
        >>> find_carried(open_dataset("aligned")).remarks  # doctest: +SKIP
        ()
    """
    numbers = _numbers_left(dataset)
    views = see_views(dataset)
    scores, refused = find_losses(dataset)
    remarks = [f"not copied: {remark}" for remark in (*refused, *_say_unlisted(dataset))]
    for seen in views:
        assert seen.view is not None
        named, num_shards = f"view {seen.view.name}", len(seen.manifest.shards)
        remarks += _say_part(named, num_shards, numbers, f"add-{seen.view.side}")
    for each in scores:
        named = f"losses of {score_manifest_name(each.teacher)}"
        remarks += _say_part(named, each.num_shards, numbers, "score")
    return Carried(
        dataset,
        numbers,
        tuple(seen for seen in views if any(n < len(seen.manifest.shards) for n in numbers)),
        tuple(each for each in scores if any(n < each.num_shards for n in numbers)),
        tuple(remarks),
    )


def copy_carried(carried: Carried, number: int, output: str, stem: str) -> CopiedShard:
    """Write a shard, less the documents that are removed, and what stands beside it.

    Args:
        carried: what is copied.
        number: of the old shard.
        output: the new dataset's folder.
        stem: the new shard's name, without suffix.

    Raises:
        DatasetError: a file is missing or damaged.

    Example:
        >>> copy_carried(carried, 0, "clean", "corpus-000000-of-000001").shard.num_documents
        1000
    """
    dataset, removed = carried.dataset, carried.dataset.removed_of(number)
    shard = copy_shard(dataset, number, output, stem)
    views = {
        seen.view.name: copy_view(seen, number, removed, output, shard)
        for seen in carried.views_of(number)
        if seen.view is not None
    }
    losses = {
        scores.teacher: copy_losses(scores, number, removed, output, shard)
        for scores in carried.scores_of(number)
    }
    return CopiedShard(shard, views, losses, carried.files_of(number))


def find_copied(
    carried: Carried, number: int, path: str, there: Mapping[str, int]
) -> CopiedShard | None:
    """Return what an earlier attempt made of a shard, None where that is not whole, or of others.

    Args:
        carried: what is copied.
        number: of the old shard.
        path: of the record that `keep_copied` has written.
        there: bytes of each file of the new dataset's folder, by name.

    Example:
        >>> find_copied(carried, 0, "clean/.vocag-f49c293b139871fd/commit-000000.json", {}) is None
        True
    """
    copied = read_commit(path, CopiedShard)
    if copied is None:
        return None
    names = {seen.view.name for seen in carried.views_of(number) if seen.view is not None}
    wanted = (names, {scores.teacher for scores in carried.scores_of(number)})
    if (set(copied.views), set(copied.losses)) != wanted:
        return None
    if copied.made_of != carried.files_of(number):
        return None
    is_whole = all(there.get(name) == num_bytes for name, num_bytes in copied.sizes.items())
    return copied if is_whole else None


def keep_copied(copied: CopiedShard, path: str, *, scratch: str) -> None:
    """Write what `find_copied` reads, once the shard's files are there."""
    storage.write_atomically(path, write_record(copied).encode(), scratch=scratch)


def _numbers_left(dataset: Dataset) -> tuple[int, ...]:
    """Return the numbers of the shards that have a document left, or of all where none has."""
    shards = dataset.manifest.shards
    left = [n.num_documents - len(dataset.removed_of(i)) for i, n in enumerate(shards)]
    return tuple(n for n, count in enumerate(left) if count) or tuple(range(len(shards)))


def _say_unlisted(dataset: Dataset) -> list[str]:
    found = find_unlisted(dataset)
    if not found:
        return []
    return [
        f"{format_plural(len(found), 'sidecar')} that no score manifest lists, such as {found[0]}: "
        "vocag score has not finished"
    ]


def _say_part(what: str, num_shards: int, numbers: tuple[int, ...], command: str) -> list[str]:
    """Return a line where some of the shards to copy are without a view's files, or losses."""
    there = sum(number < num_shards for number in numbers)
    if there == len(numbers):
        return []
    if not there:
        return [f"not copied: {what}, of no shard that is left; run vocag {command} again"]
    return [
        f"copied as far as it is there: {what}, of {there} of {len(numbers)} shards; vocag "
        f"{command} on the new dataset does the rest"
    ]
