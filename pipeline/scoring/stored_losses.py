"""Read a teacher's losses, stored by `beam_jobs.score` next to the shards."""

import json
from bisect import bisect_right
from collections.abc import Iterable
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.command_line.failures import hinted
from pipeline.dataset.cache import ShardCache
from pipeline.dataset.chosen_documents import ChosenDocuments, select_documents
from pipeline.dataset.dataset_reading import num_bytes_of
from pipeline.dataset.files import Dataset
from pipeline.dataset.score_files import (
    NO_DISTRIBUTIONS,
    SCORE_AGAIN,
    ScoreFiles,
    find_scores,
    read_sidecar,
    scores_of,
)
from pipeline.packing.plan import RowPlan
from pipeline.recent import Recent
from pipeline.scoring.contexts import ContextRule, plan_contexts
from pipeline.scoring.entries import fill_entries
from schemas.errors import ForeignLossesError
from schemas.sidecar import ShardLosses, SidecarRecord, TeacherRule

_MAX_OPEN_SIDECARS = 64


class StoredLosses:
    """Reads losses by document; keeps sidecars open. Copies for other processes open their own."""

    def __init__(
        self, scores: ScoreFiles, dataset: Dataset, plan: RowPlan, cache: ShardCache | None
    ) -> None:
        """Take checked scores: use `open_stored_losses`."""
        self.scores = scores
        self._shards = dataset.manifest.shards
        self._shard_starts: list[int] = plan.shard_document_starts.tolist()
        self._cache = cache
        self._open: Recent[int, ShardLosses] = Recent(_MAX_OPEN_SIDECARS)

    @property
    def rule(self) -> TeacherRule:
        """What determined the losses."""
        return self.scores.manifest.rule

    def mean_loss(self, document_index: int) -> float:
        """Return a document's mean loss in nats; infinite without losses."""
        opened, place, _ = self._find(document_index)
        first, end = opened.starts[place : place + 2].tolist()
        losses = opened.losses[first:end]
        known = losses[~np.isnan(losses)]
        return float(known.mean(dtype=np.float64)) if len(known) else float("inf")

    def read(self, document_index: int, start: int, stop: int) -> NDArray[np.float16]:
        """Return the losses of a document's teacher tokens, [stop - start], nats.

        Raises:
            DamagedShardError: the sidecar is missing or differs from the score manifest.
            ForeignLossesError: the document was not scored.
        """
        opened, place, shard_index = self._find(document_index)
        first, end = opened.starts[place : place + 2].tolist()
        if first + stop > end:
            raise self._not_scored(shard_index, place, f"{end - first} losses", stop)
        return opened.losses[first + start : first + stop]

    def read_entries(
        self,
        document_index: int,
        start: int,
        *,
        ids: NDArray[np.int32],
        log_probs: NDArray[np.float32],
    ) -> None:
        """Fill in the distributions at a document's positions from `start` on.

        Position l is the teacher's expectation after the first l tokens, so a document of T tokens
        has T + 1. Without context there are no entries. `ids` and `log_probs` are as in
        `fill_entries`; the column before the draws stays free for the text's own token, and draws
        share the rest of the mass equally.

        Errors as in `read` and `fill_entries`; ForeignLossesError also without stored
        distributions.
        """
        opened, place, shard_index = self._find(document_index)
        if opened.entries is None:
            raise ForeignLossesError(f"{self.scores.path} {NO_DISTRIBUTIONS}")
        first, end = opened.entries.position_starts[place : place + 2].tolist()
        stop = start + len(ids)
        if first + stop > end:
            raise self._not_scored(shard_index, place, f"{end - first} positions", stop)
        path = self.scores.sidecar(self.scores.manifest.sidecars[shard_index]).url
        fill_entries(opened.entries, place, start, ids=ids, log_probs=log_probs, at=path)

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch the sidecars of remote shards in the background."""
        if self._cache is not None:
            records = self.scores.manifest.sidecars
            self._cache.prefetch([self.scores.sidecar(records[number]) for number in shards])

    def _find(self, document_index: int) -> tuple[ShardLosses, int, int]:
        """Return a document's sidecar, its number there, and the shard's."""
        shard_index = bisect_right(self._shard_starts, document_index) - 1
        place = document_index - self._shard_starts[shard_index]
        return self._sidecar(shard_index), place, shard_index

    def _not_scored(
        self, shard_index: int, place: int, found: str, wanted: int
    ) -> ForeignLossesError:
        return ForeignLossesError(
            f"{self.scores.path} has {found} of document {place} of "
            f"{self._shards[shard_index].file}, not {wanted}: it was not scored"
        )

    def _sidecar(self, shard_index: int) -> ShardLosses:
        record, shard = self.scores.manifest.sidecars[shard_index], self._shards[shard_index]
        read = partial(read_sidecar, self.scores, record, shard, self._cache)
        return self._open.get(shard_index, read)


def open_stored_losses(
    source: str,
    dataset: Dataset,
    plan: RowPlan,
    *,
    cache: ShardCache | None = None,
    where: str = "",
    with_distributions: bool = False,
) -> StoredLosses:
    """Return stored losses, checked to be those of an online teacher of a plan's rows.

    Sidecars' sizes are compared now, their SHA-256 when first read. `source` is as in
    `find_scores`; `where` is the plan's condition.

    Raises:
        ForeignLossesError: incomplete, without required distributions, or for other data,
            documents, lengths or conventions.
        DatasetError: no such scores.
    """
    named = find_scores(
        source,
        dataset.location,
        where=where,
        with_distributions=with_distributions,
        seq_length=plan.rules.seq_length,
    )
    scores = scores_of(named, dataset)
    _require_complete(scores)
    selection = select_documents(dataset, scores.manifest.rule.where)
    if selection.where not in ("", where):
        _require_scored(scores, selection, plan)
    _require_contexts(scores, selection, plan)
    return StoredLosses(scores, dataset, plan, cache)


def _require_complete(scores: ScoreFiles) -> None:
    for record in scores.manifest.sidecars:
        claim = scores.sidecar(record)
        try:
            num_bytes = num_bytes_of(claim.url)
        except FileNotFoundError as error:
            raise ForeignLossesError(f"{claim.url} is missing: {SCORE_AGAIN}") from error
        if num_bytes is not None and num_bytes != claim.num_bytes:
            raise ForeignLossesError(
                f"{claim.url} has {num_bytes} bytes, {scores.path} says {claim.num_bytes}: "
                f"{SCORE_AGAIN}"
            )


def _require_scored(scores: ScoreFiles, selection: ChosenDocuments, plan: RowPlan) -> None:
    documents = np.unique(plan.segments["document"]).astype(np.int64)
    bounds = np.searchsorted(documents, plan.shard_document_starts)
    for shard_index, (start, stop) in enumerate(pairwise(bounds.tolist())):
        kept = selection.read(shard_index, with_removed=True)[1]
        own = documents[start:stop] - plan.shard_document_starts[shard_index]
        missing = own[:0] if kept is None else own[~kept[own]]
        if len(missing):
            raise ForeignLossesError(
                f"{scores.path} holds losses only where {selection.where}, and these rows hold "
                f"{len(missing)} other documents of {scores.manifest.sidecars[shard_index].shard}, "
                f"document {missing[0]} first, which were not scored: train with that condition, "
                f"or {SCORE_AGAIN} with the run's own --where or none"
            )


def _require_contexts(scores: ScoreFiles, selection: ChosenDocuments, plan: RowPlan) -> None:
    """Check that each token was scored with its context in the plan's rows."""
    scored, rows = ContextRule.from_json(scores.manifest.rule.context), plan.rules
    online = ContextRule.of_rows(rows)
    for name in ("first_token_id", "continued_token_id"):
        then, now = getattr(scored, name), getattr(online, name)
        if then != now:
            raise ForeignLossesError(
                f"{scores.path} was scored with {name} {json.dumps(then)}, these rows have "
                f"{json.dumps(now)}: give both the same teacher_context (the scores' is "
                f"{'none' if then is None else then}), or {SCORE_AGAIN}"
            )
    if scored.first_token_id is not None and scored.continued_token_id is not None:
        _require_all_losses(scores)
    shards = zip(scores.manifest.sidecars, plan_contexts(plan), strict=True)
    for shard_index, (record, context) in enumerate(shards):
        # A plan of chosen documents lacks the others' contexts; the index has all.
        if record.context_sha256 != context:
            index, kept = selection.read(shard_index, with_removed=True)
            pieces = online.pieces(index)
            if selection.where and kept is not None:
                pieces = pieces.of_documents(kept)
            context = pieces.context_sha256
        if record.context_sha256 != context:
            raise _split_elsewhere(scores, record, scored, online)


def _split_elsewhere(
    scores: ScoreFiles, record: SidecarRecord, scored: ContextRule, online: ContextRule
) -> ForeignLossesError:
    lengths = (scored.seq_length, scored.teacher_seq_length)
    if lengths == (online.seq_length, online.teacher_seq_length):
        return ForeignLossesError(
            f"{scores.path} was scored for students with {scored.describe_around()}, these rows "
            f"have {online.describe_around()}, so {scored.describe()} split documents of "
            f"{record.shard} elsewhere: give the student_bos and student_eos that were scored "
            f"with, or {SCORE_AGAIN} with --student-bos and --student-eos of the run"
        )
    error = ForeignLossesError(
        f"{scores.path} was scored for {scored.describe()}, which splits "
        f"{record.num_split_documents} documents of {record.shard}; {online.describe()} "
        "split them elsewhere, so their tokens see different contexts: train with the "
        f"lengths of the scores, or {SCORE_AGAIN} with --seq-length {online.seq_length} "
        f"--teacher-seq-length {online.teacher_seq_length}"
    )
    return hinted(error, "seq_length={} teacher_seq_length={}".format(*lengths))


def _require_all_losses(scores: ScoreFiles) -> None:
    for record in scores.manifest.sidecars:
        if record.num_losses != record.num_tokens:
            raise ForeignLossesError(
                f"{record.file} has losses of {record.num_losses} tokens, but {record.num_tokens} "
                f"have a context: {SCORE_AGAIN}"
            )
