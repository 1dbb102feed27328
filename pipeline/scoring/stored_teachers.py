"""The stored losses of a run's teachers, read as one teacher's."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.cache import ShardCache
from pipeline.packing.opening import OpenedDataset
from pipeline.packing.plan import RowPlan
from pipeline.recent import Recent
from pipeline.scoring.stored_losses import StoredLosses, open_stored_losses
from pipeline.scoring.teaching import Teaching
from schemas.distribution_rule import DistributionRule, EntryShape
from schemas.errors import ForeignLossesError
from schemas.sidecar import TeacherRule

_MAX_KNOWN_DOCUMENTS = 1 << 16


@dataclass(frozen=True)
class TeachersRule:
    """What determines the losses of a run's teachers; `weights` are a mean's."""

    rules: tuple[TeacherRule, ...]
    weights: tuple[float, ...]

    @property
    def fingerprint(self) -> str:
        """64 hex digits; a single teacher keeps its own."""
        if len(self.rules) == 1:
            return self.rules[0].fingerprint
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def shape(self) -> EntryShape | None:
        """A row's room for entries: all of a mean's teachers, else the most of one."""
        found = [rule.distributions.shape for rule in self.rules if rule.distributions is not None]
        if not self.weights or not found:
            return max(found, key=lambda shape: shape.exact, default=None)
        return EntryShape(sum(each.exact for each in found), sum(each.drawn for each in found))

    def as_read(self, *, with_distributions: bool) -> "TeachersRule":
        """Drop what may differ between datasets: which documents were scored, and what isn't read.

        A teacher's losses are the same with and without distributions next to them.
        """
        rules = tuple(
            replace(own, where="", distributions=own.distributions if with_distributions else None)
            for own in self.rules
        )
        return replace(self, rules=rules)


class StoredTeachers:
    """Reads a dataset's losses stored by a run's teachers."""

    def __init__(self, parts: Sequence[StoredLosses], weights: Sequence[float]) -> None:
        """Read several as their mean, by weights that add up to 1.

        Without weights, each document has the teacher with its least mean loss.
        """
        self._parts, self._weights = tuple(parts), tuple(weights)
        self._chosen: Recent[int, StoredLosses] = Recent(_MAX_KNOWN_DOCUMENTS)
        self.rule = TeachersRule(tuple(part.rule for part in parts), self._weights)

    @property
    def apart(self) -> list["StoredTeachers"]:
        """Each teacher of a mean, alone; otherwise these."""
        if not self._weights:
            return [self]
        return [StoredTeachers((part,), (1.0,)) for part in self._parts]

    def read(self, document_index: int, start: int, stop: int) -> NDArray[np.floating]:
        """See `StoredLosses.read`."""
        parts = self._parts_of(document_index)
        if len(parts) == 1:
            return parts[0].read(document_index, start, stop)
        total = np.zeros(stop - start, np.float32)
        for part, weight in zip(parts, self._weights, strict=True):
            total += np.float32(weight) * part.read(document_index, start, stop)
        return total

    def read_entries(
        self,
        document_index: int,
        start: int,
        *,
        ids: NDArray[np.int32],
        log_probs: NDArray[np.float32],
    ) -> None:
        """See `StoredLosses.read_entries`; a mean's are read `apart`."""
        (part,) = self._parts_of(document_index)
        part.read_entries(document_index, start, ids=ids, log_probs=log_probs)

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch remote shards' sidecars in the background."""
        wanted = list(shards)
        for part in self._parts:
            part.prefetch(wanted)

    def _parts_of(self, document_index: int) -> Sequence[StoredLosses]:
        if self._weights or len(self._parts) == 1:
            return self._parts

        def choose() -> StoredLosses:
            return min(self._parts, key=lambda part: part.mean_loss(document_index))

        return (self._chosen.get(document_index, choose),)


def open_teachers(
    teaching: Teaching,
    opened: OpenedDataset,
    plan: RowPlan,
    *,
    cache: ShardCache | None,
    with_distributions: bool,
) -> StoredTeachers:
    """Return the stored losses of a run's teachers, checked by `open_stored_losses`.

    ForeignLossesError, also if a teacher is named twice, or draws can't be read as one's.
    """
    parts = [
        open_stored_losses(
            name,
            opened.dataset,
            plan,
            cache=cache,
            where=opened.documents.where,
            with_distributions=with_distributions,
        )
        for name in teaching.names
    ]
    if len({part.rule.fingerprint for part in parts}) < len(parts):
        raise ForeignLossesError(
            f"{' and '.join(teaching.names)} name one teacher's scores twice: name each once"
        )
    if with_distributions and len(parts) > 1:
        _require_alike([part.rule.distributions for part in parts], teaching)
    return StoredTeachers(parts, teaching.shares)


def _require_alike(rules: Sequence[DistributionRule | None], teaching: Teaching) -> None:
    sizes = {(rule.top_k, rule.shape.drawn) for rule in rules if rule is not None}
    if len(sizes) > 1 and any(drawn for _, drawn in sizes):
        raise ForeignLossesError(
            f"{' and '.join(teaching.names)} were scored with different --top-k and --draws "
            f"({' and '.join(f'{k} and {n}' for k, n in sorted(sizes))}): a row holds equally many "
            "for each document, and a mean some of each teacher; score them alike"
        )
