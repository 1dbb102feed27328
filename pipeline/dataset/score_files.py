"""Find teachers' losses next to a dataset."""

import fnmatch
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import fsspec

from pipeline.command_line.failures import hinted
from pipeline.command_line.git_lfs import POINTER_BYTES, refuse_pointer
from pipeline.command_line.pasted import pasted
from pipeline.dataset.cache import ListedFile, ShardCache
from pipeline.dataset.dataset_reading import (
    find_generation,
    folder_of,
    read_manifest_bytes,
    read_whole,
)
from pipeline.dataset.files import Dataset
from schemas.errors import DamagedShardError, DatasetError, ForeignLossesError
from schemas.manifest import ShardRecord
from schemas.sidecar import (
    ScoreManifest,
    ShardLosses,
    SidecarRecord,
    decode_score_manifest,
    decode_sidecar,
)

SCORE_AGAIN = "run vocag score again"
NO_DISTRIBUTIONS = f"holds losses and no distributions: {SCORE_AGAIN} with --top-k"
# What servers without listings answer, but 404: nginx 403.
_UNLISTED = 403, 405


@dataclass(frozen=True)
class ScoreFiles:
    """A score manifest, its path, and its sidecars' folder: a path, or a URL."""

    location: str
    manifest: ScoreManifest
    path: str

    def sidecar(self, record: SidecarRecord) -> ListedFile:
        """Return a sidecar's file as listed; a local url is a plain path."""
        return ListedFile(f"{self.location}/{record.file}", record.num_bytes, record.sha256)


def find_scores(
    source: str,
    location: str,
    *,
    where: str = "",
    with_distributions: bool = False,
    seq_length: int = 0,
    choose: Callable[[str], str] = "stored_losses={}".format,
) -> ScoreFiles:
    """Find scores by name.

    Args:
        source: path of a score manifest; or, for scores next to a dataset's shards, the scored
            --teacher, its last part, or the beginning of the fingerprint; "": the only ones.
        location: the dataset's folder.
        where: of several that differ only in their condition, prefer this one, else those of all
            documents.
        with_distributions: require distributions; otherwise, of several that differ only in these,
            take the smallest.
        seq_length: of the rows to be trained on, for the hint; 0: not known.
        choose: gives the hint that names one of several, by its fingerprint.

    Raises:
        DatasetError: none, or several, of that name.
        ForeignLossesError: the named manifest has no distributions.
    """
    if source.endswith(".json"):
        scores = _read_scores(source)
        if with_distributions and scores.manifest.rule.distributions is None:
            raise ForeignLossesError(f"{scores.path} {NO_DISTRIBUTIONS}")
        return scores
    found = list_scores(location)
    named = [scores for scores in found if not source or _is_named(scores.manifest, source)]
    fitting = _fitting(named, where, with_distributions=with_distributions)
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(
        f'{s.manifest.rule.fingerprint[:16]} ("{s.manifest.source}", {_describe(s)})' for s in found
    )
    which = f"{len(fitting)} teachers are named" if fitting else "there are no scores by teacher"
    of_what = " with distributions (vocag score --top-k)" if with_distributions else ""
    remedy = f"name one of {there} by its first digits, or" if there else "nothing has scored it:"
    missing = DatasetError(
        f'{which} "{source}"{of_what} in {location}: {remedy} run vocag score first'
    )
    if fitting:
        raise hinted(missing, choose(_likeliest(fitting, seq_length)))
    # A path from another folder: scoring again would find everything done.
    last = source.rstrip("/").rpartition("/")[2]
    named = [scores for scores in found if last and _is_named(scores.manifest, last)]
    if alike := _fitting(named, where, with_distributions=with_distributions):
        raise hinted(missing, f"{choose(_likeliest(alike, seq_length))}  # if it is that one")
    hint = scoring_command(location, source, with_distributions, seq_length)
    raise hinted(missing, hint)


def scoring_command(
    location: str, teacher: str = "", with_distributions: bool = False, seq_length: int = 0
) -> str:
    """Return the command that makes a dataset's scores."""
    top = " --top-k 8" if with_distributions else ""
    rows = str(seq_length) if seq_length else "2048  # student tokens per row in training"
    teacher = pasted(teacher or "MODEL")
    return f"vocag score {pasted(location)} --teacher {teacher}{top} --seq-length {rows}"


def _likeliest(found: list[ScoreFiles], seq_length: int) -> str:
    """Name the scores of rows of this length, if any."""
    rules = [scores.manifest.rule for scores in found]
    of_length = [rule for rule in rules if rule.context["seq_length"] == seq_length]
    return (of_length or rules)[0].fingerprint[:16]


def _fitting(named: list[ScoreFiles], where: str, *, with_distributions: bool) -> list[ScoreFiles]:
    """Choose among scores that differ only in condition or unneeded parts."""
    if with_distributions:
        named = [scores for scores in named if scores.manifest.rule.distributions]
    ignored: dict[str, Any] = {"where": ""}
    if not with_distributions:
        ignored["distributions"] = None
    if len({replace(s.manifest.rule, **ignored).fingerprint for s in named}) != 1:
        return named
    conditions = {scores.manifest.rule.where for scores in named}
    taken = where if where in conditions else ""
    named = [s for s in named if s.manifest.rule.where == taken] or named
    same = with_distributions or len({scores.manifest.rule.where for scores in named}) > 1
    return named if same else [min(named, key=_size_of_entries)]


def _size_of_entries(scores: ScoreFiles) -> tuple[int, str]:
    rule = scores.manifest.rule
    return rule.distributions.top_k if rule.distributions else 0, rule.fingerprint


def list_scores(location: str) -> list[ScoreFiles]:
    """Return all scores next to a dataset's shards; DatasetError if one is unreadable."""
    return [_read_scores(f"{location}/{name}") for name in _names(location, "teacher-*.json")]


def scores_to_paste(location: str, *, with_distributions: bool, seq_length: int) -> str:
    """Return the option that reads a dataset's scores, or the command that makes some."""
    read_manifest_bytes(location)
    location = folder_of(location)
    found = _fitting(list_scores(location), "", with_distributions=with_distributions)
    if not found:
        return scoring_command(location, "", with_distributions, seq_length)
    name = '""' if len(found) == 1 else _likeliest(found, seq_length)
    return f"stored_losses={name}"


def find_unlisted(location: str, scores: Iterable[ScoreFiles]) -> list[str]:
    """Return the sidecars next to a dataset's shards that no score manifest lists."""
    listed = {record.file for each in scores for record in each.manifest.sidecars}
    return sorted({*_names(location, "*.teacher-*.safetensors")} - listed)


def _names(location: str, pattern: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(location)
    try:
        # Not by its glob, which takes a failed listing for an empty one.
        found = filesystem.ls(path, detail=False)
    except FileNotFoundError:
        found = []
    except Exception as error:  # aiohttp's has a status
        if getattr(error, "status", 0) not in _UNLISTED:
            raise
        found = []
    # Else a store's client keeps this list when files are added or change.
    filesystem.invalidate_cache()
    return sorted(fnmatch.filter((name.rsplit("/", 1)[-1] for name in found), pattern))


def scores_of(scores: ScoreFiles, dataset: Dataset) -> ScoreFiles:
    """Return the scores of a dataset's shards; ForeignLossesError unless all are scored.

    Scores of a later generation begin with an earlier one's.
    """
    manifest = dataset.manifest
    found, wanted = scores.manifest.dataset, manifest.fingerprint
    if not dataset.has_generation(found):
        raise ForeignLossesError(
            f"{scores.path} was made for dataset {found[:16]}…, this is {wanted[:16]}…: "
            f"{SCORE_AGAIN} on this one"
        )
    shards = [shard.file for shard in manifest.shards]
    sidecars = scores.manifest.sidecars
    scored = [record.shard for record in sidecars]
    # Scores of this generation list exactly its shards.
    own = sidecars if found == wanted else sidecars[: len(shards)]
    if [record.shard for record in own] != shards:
        missing = sorted(set(shards) - set(scored))
        raise ForeignLossesError(
            f"{scores.path} lists sidecars of {len(scored)} shards, the dataset has {len(shards)}"
            f"{', ' + missing[0] + ' is missing' if missing else ''}: {SCORE_AGAIN}"
        )
    is_whole = not scores.manifest.rule.where and not scores.manifest.rule.learned_only
    for shard, record in zip(manifest.shards, own, strict=True):
        num_unscored = shard.num_teacher_tokens - record.num_tokens
        if num_unscored < 0 or (num_unscored and is_whole):
            raise ForeignLossesError(
                f"{scores.path} has {record.num_tokens} losses for {shard.file}, which has "
                f"{shard.num_teacher_tokens} teacher tokens: {SCORE_AGAIN}"
            )
    return replace(scores, manifest=replace(scores.manifest, sidecars=own))


def scored_generation(scores: ScoreFiles, dataset: Dataset) -> Dataset:
    """Return a dataset as it was when scored, or raise DatasetError."""
    number = find_generation(dataset.manifest, scores.manifest.dataset)
    return dataset if number is None else dataset.at_generation(number)


def open_sidecar(claim: ListedFile, cache: ShardCache | None) -> ShardLosses:
    """Return a sidecar's losses, mapped, or read if remote without a cache.

    DamagedShardError if it is missing or altered.
    """
    is_remote = "://" in claim.url
    try:
        if is_remote and cache is None:
            data = memoryview(read_whole(claim.url))
        else:
            with cache.open(claim) if is_remote and cache else open(claim.url, "rb") as file:
                # An empty file can't be mapped.
                empty = not file.seek(0, 2)
                data = memoryview(
                    b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                )
    except FileNotFoundError as error:
        raise DamagedShardError(f"{claim.url} is missing: {SCORE_AGAIN}") from error
    if sha256(data).hexdigest() != claim.sha256:
        refuse_pointer(claim.url, bytes(data[:POINTER_BYTES]))
        raise DamagedShardError(
            f"{claim.url} is not the sidecar that its score manifest names (SHA-256 differs): "
            f"delete it and {SCORE_AGAIN}"
        )
    return decode_sidecar(data, at=claim.url)


def read_sidecar(
    scores: ScoreFiles, record: SidecarRecord, shard: ShardRecord, cache: ShardCache | None = None
) -> ShardLosses:
    """Open a sidecar of a score manifest; ForeignLossesError if its teacher or tar differs."""
    claim = scores.sidecar(record)
    losses = open_sidecar(claim, cache)
    if len(losses.starts) != shard.num_documents + 1:
        raise DamagedShardError(
            f"{claim.url} holds losses of {len(losses.starts) - 1} documents, the shard "
            f"{shard.num_documents}: delete it and {SCORE_AGAIN}"
        )
    if (losses.teacher, losses.shard_sha256) != (scores.manifest.rule.fingerprint, shard.sha256):
        raise ForeignLossesError(
            f"{claim.url} holds losses of teacher {losses.teacher[:16]}… for shard "
            f"{losses.shard_sha256[:16]}…, not those that {scores.path} names: {SCORE_AGAIN}"
        )
    return losses


def _read_scores(path: str) -> ScoreFiles:
    try:
        data = read_whole(path)
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path} does not exist: no teacher has scored the dataset to its end; run "
            "vocag score, or run it again to resume"
        ) from error
    location = path.rsplit("/", 1)[0] if "/" in path else "."
    filesystem, local = fsspec.core.url_to_fs(location)
    location = local if "file" in filesystem.protocol else location
    return ScoreFiles(location, decode_score_manifest(data, at=path), path)


def _is_named(manifest: ScoreManifest, name: str) -> bool:
    source = manifest.source.rstrip("/")
    names = (source, source.rsplit("/", 1)[-1])
    is_start = len(name) >= 4 and manifest.rule.fingerprint.startswith(name)
    return name.rstrip("/") in names or is_start


def _describe(scores: ScoreFiles) -> str:
    rule = scores.manifest.rule
    engine = "" if rule.engine is None else f", by {rule.engine.describe()}"
    which = f", where {rule.where}" if rule.where else ""
    top = f", {rule.distributions.describe()}" if rule.distributions else ""
    student, teacher = (rule.context[f"{side}seq_length"] for side in ("", "teacher_"))
    rows = f"rows of {student} student and {teacher} teacher tokens"
    return f"{rule.dtype}{engine}, {rows}{top}{which}"
