"""Losses that a teacher has given once, read beside the shards; the rest of `beam_jobs.score`.

Losses are used only where an online teacher would have given the same: `open_stored_losses` holds
the score manifest against the dataset and against the plan of rows, and refuses with the reason.
"""

from __future__ import annotations

import glob
import json
import mmap
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise

import fsspec
import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.cache import ListedFile, ShardCache
from pipeline.dataset.files import Dataset
from pipeline.dataset.reading import read_whole
from pipeline.dataset.selection import ChosenDocuments, select_documents
from pipeline.packing.plan import RowPlan
from pipeline.scoring.contexts import ContextRule, plan_contexts
from schemas.errors import DamagedShardError, DatasetError, ForeignLossesError
from schemas.manifest import ShardRecord
from schemas.sidecar import (
    ScoreManifest,
    ShardLosses,
    SidecarRecord,
    decode_score_manifest,
    decode_sidecar,
)

_MAX_OPEN_SIDECARS = 64
_AGAIN = "run beam_jobs.score again"


@dataclass(frozen=True)
class ScoreFiles:
    """A score manifest and where its sidecars lie.

    Attributes:
        location: the folder: a path, or a URL that `fsspec` reads.
        manifest: what lies there.
        path: of the manifest.
    """

    location: str
    manifest: ScoreManifest
    path: str

    def sidecar(self, record: SidecarRecord) -> ListedFile:
        """Return a sidecar as the score manifest describes it; a local url is a plain path."""
        return ListedFile(f"{self.location}/{record.file}", record.num_bytes, record.sha256)


class StoredLosses:
    """Reads losses by document; holds open sidecars. Copies for other processes open their own."""

    def __init__(
        self, scores: ScoreFiles, dataset: Dataset, plan: RowPlan, cache: ShardCache | None
    ) -> None:
        """Use `open_stored_losses`.

        Args:
            scores: checked against the dataset.
            dataset: the dataset.
            plan: says which shard holds which document.
            cache: for a remote dataset.
        """
        self.scores = scores
        self._shards = dataset.manifest.shards
        self._shard_starts: list[int] = plan.shard_document_starts.tolist()
        self._cache = cache
        self._open: OrderedDict[int, ShardLosses] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        """Leave memory maps behind when a worker process gets a copy."""
        return self.__dict__ | {"_open": OrderedDict()}

    def read(self, document_index: int, start: int, stop: int) -> NDArray[np.float16]:
        """Return the losses of some teacher tokens of a document, float16 [stop - start], nats.

        Raises:
            DamagedShardError: the sidecar is missing or is not the score manifest's.
            ForeignLossesError: the document was not scored.

        Example:
            >>> losses.read(7, 0, 3)
            array([2.5  , 0.125, 7.75 ], dtype=float16)
        """
        shard_index = bisect_right(self._shard_starts, document_index) - 1
        opened = self._sidecar(shard_index)
        place = document_index - self._shard_starts[shard_index]
        first, end = opened.starts[place : place + 2].tolist()
        if first + stop > end:
            raise ForeignLossesError(
                f"{self.scores.path} has {end - first} losses of document {place} of "
                f"{self._shards[shard_index].file}, not {stop}: it was not scored"
            )
        return opened.losses[first + start : first + stop]

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch the sidecars of remote shards in the background."""
        if self._cache is not None:
            records = self.scores.manifest.sidecars
            self._cache.prefetch(
                [self.scores.sidecar(records[shard_index]) for shard_index in shards]
            )

    def _sidecar(self, shard_index: int) -> ShardLosses:
        opened = self._open.get(shard_index)
        if opened is not None:
            self._open.move_to_end(shard_index)
            return opened
        record = self.scores.manifest.sidecars[shard_index]
        opened = self._open[shard_index] = self._read(record, shard_index)
        if len(self._open) > _MAX_OPEN_SIDECARS:
            self._open.popitem(last=False)
        return opened

    def _read(self, record: SidecarRecord, shard_index: int) -> ShardLosses:
        data = map_sidecar(self.scores.sidecar(record), self._cache)
        return decode_listed(data, record, self.scores, self._shards[shard_index])


def open_stored_losses(
    source: str,
    dataset: Dataset,
    plan: RowPlan,
    *,
    cache: ShardCache | None = None,
    where: str = "",
) -> StoredLosses:
    """Return stored losses, checked to be those that an online teacher would give for a plan.

    Every sidecar's size is compared now, its SHA-256 when a process first reads it.

    Args:
        source: a score manifest, or the name of a teacher as in `find_scores`.
        dataset: the dataset.
        plan: of the rows that they are for.
        cache: for a remote dataset.
        where: the condition by which the plan's documents were chosen, "" for none.

    Raises:
        ForeignLossesError: incomplete, or for other data, documents, lengths or conventions.
        DatasetError: no such scores.

    Example:
        >>> open_stored_losses("models/teacher", dataset, plan).read(0, 0, 2)
        array([2.5  , 0.125], dtype=float16)
    """
    named = find_scores(source, dataset.location, where=where)
    scores = scores_of(named, dataset)
    _require_complete(scores)
    selection = select_documents(dataset, scores.manifest.rule.where)
    if selection.where not in ("", where):
        _require_scored(scores, selection, plan)
    _require_contexts(scores, selection, plan)
    return StoredLosses(scores, dataset, plan, cache)


def find_scores(source: str, location: str, *, where: str = "") -> ScoreFiles:
    """Return the scores that a user names.

    Args:
        source: path of a score manifest; or, of the scores beside a dataset's shards, what
            `beam_jobs.score` was given as --teacher, its last part, or the beginning of the
            fingerprint; "": the only ones there are.
        location: the dataset's folder.
        where: of several that differ in their condition only, take those with this one, or else
            those of all documents.

    Raises:
        DatasetError: none, or several of that name.

    Example:
        >>> find_scores("Qwen/Qwen2.5-Math-7B", "aligned").path  # doctest: +SKIP
        'aligned/teacher-08e924cac34e2837.json'
    """
    if source.endswith(".json"):
        return _read_scores(source)
    found = list_scores(location)
    named = [scores for scores in found if not source or _is_named(scores.manifest, source)]
    if len({replace(scores.manifest.rule, where="").fingerprint for scores in named}) == 1:
        by_condition = {scores.manifest.rule.where: scores for scores in named}
        fitting = by_condition.get(where) or by_condition.get("")
        named = [fitting] if fitting else named
    if len(named) == 1:
        return named[0]
    there = ", ".join(
        f'{s.manifest.rule.fingerprint[:16]} ("{s.manifest.source}", {_describe(s)})' for s in found
    )
    which = f"{len(named)} teachers are named" if named else "no scores are of teacher"
    raise DatasetError(
        f'{which} "{source}" in {location}: name one of {there or "none"} by its first '
        "digits, or run beam_jobs.score first"
    )


def map_sidecar(claim: ListedFile, cache: ShardCache | None = None) -> memoryview:
    """Return a sidecar's bytes, mapped, or read where they are remote and there is no cache.

    Args:
        claim: what its score manifest says of it; the size is compared, the hash is not.
        cache: for remote ones.

    Raises:
        DamagedShardError: it is missing, or of another size.
    """
    is_remote = "://" in claim.url
    try:
        if is_remote and cache is None:
            data = memoryview(read_whole(claim.url))
            num_bytes = len(data)
        else:
            with cache.open(claim) if is_remote and cache else open(claim.url, "rb") as file:
                num_bytes = file.seek(0, 2)
                if num_bytes:
                    data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError as error:
        raise DamagedShardError(f"{claim.url} is missing: {_AGAIN}") from error
    if num_bytes != claim.num_bytes:
        raise _altered(claim.url)
    return data


def decode_listed(
    data: bytes | memoryview, record: SidecarRecord, scores: ScoreFiles, shard: ShardRecord
) -> ShardLosses:
    """Return the losses of a sidecar, which must be the one that its score manifest names.

    Args:
        data: the file's bytes.
        record: what the score manifest says of it.
        scores: whose it is.
        shard: that was scored.

    Raises:
        DamagedShardError: the bytes are others.
        ForeignLossesError: they are of another teacher or another tar.
    """
    url = scores.sidecar(record).url
    if sha256(data).hexdigest() != record.sha256:
        raise _altered(url)
    losses = decode_sidecar(data, where=url)
    if (losses.teacher, losses.shard_sha256) != (scores.manifest.rule.fingerprint, shard.sha256):
        raise ForeignLossesError(
            f"{url} holds losses of teacher {losses.teacher[:16]}… for shard "
            f"{losses.shard_sha256[:16]}…, not those that {scores.path} names: {_AGAIN}"
        )
    return losses


def list_scores(location: str) -> list[ScoreFiles]:
    """Return every teacher's scores that lie beside a dataset's shards.

    Raises:
        DatasetError: a score manifest is unreadable.
    """
    filesystem, path = fsspec.core.url_to_fs(location)
    found = filesystem.glob(f"{glob.escape(path)}/teacher-*.json")
    # A store's client would believe this list from now on, also of files that come or change.
    filesystem.invalidate_cache()
    names = sorted(name.rsplit("/", 1)[-1] for name in found)
    return [_read_scores(f"{location}/{name}") for name in names]


def scores_of(scores: ScoreFiles, dataset: Dataset) -> ScoreFiles:
    """Return the scores of a dataset's shards, each of which must have been scored.

    Scores of a later generation hold those of an earlier one, whose shards come first, and a
    generation that leaves documents out has the shards of the one before. Each sidecar names its
    tar's SHA-256, which is compared where it is read.

    Raises:
        ForeignLossesError: they are another dataset's, or a shard is missing.

    Example:
        >>> len(scores_of(scores, dataset).manifest.sidecars) == len(dataset.manifest.shards)
        True
    """
    manifest = dataset.manifest
    found, wanted = scores.manifest.dataset, manifest.fingerprint
    if not dataset.has_generation(found):
        raise ForeignLossesError(
            f"{scores.path} was made for dataset {found[:16]}…, this is {wanted[:16]}…: {_AGAIN} "
            "on this one"
        )
    shards = [shard.file for shard in manifest.shards]
    sidecars = scores.manifest.sidecars
    scored = [record.shard for record in sidecars]
    # What was made for these very shards must list them and no others.
    own = sidecars if found == wanted else sidecars[: len(shards)]
    if [record.shard for record in own] != shards:
        missing = sorted(set(shards) - set(scored))
        raise ForeignLossesError(
            f"{scores.path} lists sidecars of {len(scored)} shards, the dataset has {len(shards)}"
            f"{', ' + missing[0] + ' is missing' if missing else ''}: {_AGAIN}"
        )
    is_whole = not scores.manifest.rule.where
    for shard, record in zip(manifest.shards, own, strict=True):
        num_unscored = shard.num_teacher_tokens - record.num_tokens
        if num_unscored < 0 or (num_unscored and is_whole):
            raise ForeignLossesError(
                f"{scores.path} has {record.num_tokens} losses for {shard.file}, which has "
                f"{shard.num_teacher_tokens} teacher tokens: {_AGAIN}"
            )
    return replace(scores, manifest=replace(scores.manifest, sidecars=own))


def _read_scores(path: str) -> ScoreFiles:
    try:
        with fsspec.open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path} does not exist: no teacher has scored the dataset to its end; run "
            "beam_jobs.score, or again to resume it"
        ) from error
    location = path.rsplit("/", 1)[0] if "/" in path else "."
    filesystem, local = fsspec.core.url_to_fs(location)
    location = local if "file" in filesystem.protocol else location
    return ScoreFiles(location, decode_score_manifest(data, where=path), path)


def _is_named(manifest: ScoreManifest, name: str) -> bool:
    source = manifest.source.rstrip("/")
    names = (source, source.rsplit("/", 1)[-1])
    is_start = len(name) >= 4 and manifest.rule.fingerprint.startswith(name)
    return name.rstrip("/") in names or is_start


def _describe(scores: ScoreFiles) -> str:
    rule = scores.manifest.rule
    engine = "" if rule.engine is None else f", by {rule.engine.describe()}"
    which = f", where {rule.where}" if rule.where else ""
    return f"{rule.dtype}{engine}, {ContextRule.from_json(rule.context).describe()}{which}"


def _require_complete(scores: ScoreFiles) -> None:
    filesystem, _ = fsspec.core.url_to_fs(scores.location)
    for record in scores.manifest.sidecars:
        claim = scores.sidecar(record)
        try:
            num_bytes = filesystem.size(claim.url)
        except FileNotFoundError as error:
            raise ForeignLossesError(f"{claim.url} is missing: {_AGAIN}") from error
        if num_bytes is not None and num_bytes != claim.num_bytes:
            raise ForeignLossesError(
                f"{claim.url} has {num_bytes} bytes, {scores.path} says {claim.num_bytes}: {_AGAIN}"
            )


def _require_scored(scores: ScoreFiles, selection: ChosenDocuments, plan: RowPlan) -> None:
    """Check that every document of a plan is one of those that were scored."""
    documents = np.unique(plan.segments["document"]).astype(np.int64)
    bounds = np.searchsorted(documents, plan.shard_document_starts)
    for shard_index, (start, stop) in enumerate(pairwise(bounds.tolist())):
        kept = selection.read(shard_index, with_removed=True)[1]
        own = documents[start:stop] - plan.shard_document_starts[shard_index]
        missing = own[:0] if kept is None else own[~kept[own]]
        if len(missing):
            raise ForeignLossesError(
                f"{scores.path} holds losses where {selection.where} only, and these rows hold "
                f"{len(missing)} other documents of {scores.manifest.sidecars[shard_index].shard}, "
                f"document {missing[0]} first, which were not scored: train with that condition, "
                f"or {_AGAIN} with the run's own --where or none"
            )


def _require_contexts(scores: ScoreFiles, selection: ChosenDocuments, plan: RowPlan) -> None:
    """Check that each token was scored with the context that the plan's rows give it.

    A plan of some documents only is without the contexts of the others; where digests differ the
    shard's index tells how all of them would be split.
    """
    scored, rows = ContextRule.from_json(scores.manifest.rule.context), plan.rules
    online = ContextRule.of_rows(rows)
    for name in ("first_token_id", "continued_token_id"):
        then, now = getattr(scored, name), getattr(online, name)
        if then != now:
            raise ForeignLossesError(
                f"{scores.path} was scored with {name} {json.dumps(then)}, these rows have "
                f"{json.dumps(now)}: give both the same --teacher-context (the scores' is "
                f"{'none' if then is None else then}), or {_AGAIN}"
            )
    if scored.first_token_id is not None and scored.continued_token_id is not None:
        _require_all_losses(scores)
    shards = zip(scores.manifest.sidecars, plan_contexts(plan), strict=True)
    for shard_index, (record, context) in enumerate(shards):
        if record.context_sha256 != context:
            index, kept = selection.read(shard_index, with_removed=True)
            pieces = online.pieces(index)
            if selection.where and kept is not None:
                pieces = pieces.of_documents(kept)
            context = pieces.context_sha256
        if record.context_sha256 != context:
            raise ForeignLossesError(
                f"{scores.path} was scored for {scored.describe()}, which splits "
                f"{record.num_split_documents} documents of {record.shard}; {online.describe()} "
                "split them elsewhere, so that their tokens see other contexts: train with the "
                f"lengths of the scores, or {_AGAIN} with --seq-length {rows.seq_length} "
                f"--teacher-seq-length {rows.teacher_seq_length}"
            )


def _require_all_losses(scores: ScoreFiles) -> None:
    """Check that no token lacks a loss, since something stands before each."""
    for record in scores.manifest.sidecars:
        if record.num_losses != record.num_tokens:
            raise ForeignLossesError(
                f"{record.file} has losses of {record.num_losses} tokens where {record.num_tokens} "
                f"have a context: {_AGAIN}"
            )


def _altered(url: str) -> DamagedShardError:
    return DamagedShardError(
        f"{url} is not the sidecar that its score manifest names (size or SHA-256 differs): delete "
        f"it and {_AGAIN}"
    )
