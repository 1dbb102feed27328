"""Losses that teachers have given a dataset, of the documents that stay in it.

They may go along: a loss depends on its teacher, on the document's own tokens and on where these
are split, and a `TeacherRule` names nothing else: neither a shard nor the other documents. So a
rule, and with it the name of its scores, is the same for the new dataset, and what is carried over
is what the teacher once gave, to the bit. (Scored anew, a loss may differ in its last bit, since
other documents then share a batch with it.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import fsspec
import numpy as np
from numpy.typing import NDArray

from beam_jobs import storage
from pipeline.dataset.files import Dataset
from pipeline.packing.rules import suggest_teacher_seq_length
from pipeline.scoring.as_scored import scored_generation, through_view
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.sidecars import describe_sidecar
from pipeline.scoring.stored_losses import ScoreFiles, decode_listed, list_scores, scores_of
from schemas.errors import DamagedShardError, DatasetError
from schemas.index import take_documents
from schemas.manifest import Manifest, ShardRecord
from schemas.sidecar import (
    ScoreManifest,
    SidecarRecord,
    encode_score_manifest,
    encode_sidecar,
    score_manifest_name,
    sidecar_name,
    take_losses,
)
from schemas.viewed import view_manifest

_SIDECAR_MARK, _SIDECAR_SUFFIX = ".teacher-", ".safetensors"
"""What `schemas.sidecar.sidecar_name` puts around a teacher's first digits."""


@dataclass(frozen=True)
class Scores:
    """A teacher's scores of a dataset.

    Attributes:
        files: a sidecar for each shard of `dataset`.
        dataset: as it was scored: the generation, and the view.
    """

    files: ScoreFiles
    dataset: Dataset

    @property
    def teacher(self) -> str:
        """Fingerprint of the `TeacherRule`."""
        return self.files.manifest.rule.fingerprint

    @property
    def num_shards(self) -> int:
        """How many shards were scored; they are the dataset's first ones."""
        return len(self.files.manifest.sidecars)


def find_losses(dataset: Dataset) -> tuple[list[Scores], list[str]]:
    """Return the scores beside a dataset, and why others there are not its own.

    Raises:
        DatasetError: a score manifest is unreadable.

    Example:
        >>> find_losses(open_dataset("aligned"))[1]  # doctest: +SKIP
        []
    """
    found, refused = list[Scores](), list[str]()
    for files in list_scores(dataset.location):
        try:
            scored = scored_generation(files, through_view(files, dataset))
            found.append(Scores(scores_of(files, scored), scored))
        except DatasetError as error:
            refused.append(
                f"losses of {score_manifest_name(files.manifest.rule.fingerprint)}: {error}"
            )
    return found, refused


def find_unlisted(dataset: Dataset) -> list[str]:
    """Return the sidecars that no score manifest lists, as a killed `vocag score` leaves them.

    Nothing says what they should hold.
    """
    scores = list_scores(dataset.location)
    listed = {record.file for each in scores for record in each.manifest.sidecars}
    names = sorted(storage.list_folder(dataset.location))
    marked = [n for n in names if _SIDECAR_MARK in n and n.endswith(_SIDECAR_SUFFIX)]
    return [name for name in marked if name not in listed]


def copy_losses(
    scores: Scores, shard_index: int, removed: NDArray[np.int64], output: str, shard: ShardRecord
) -> SidecarRecord:
    """Write a shard's sidecar, less some documents; the losses are those that are stored.

    Args:
        scores: of the old dataset.
        shard_index: number of the shard there.
        removed: places of the documents to leave out, ascending.
        output: the new dataset's folder.
        shard: the new shard.

    Raises:
        DamagedShardError: the sidecar is not the one that its score manifest names.
        ForeignLossesError: it is another shard's or teacher's.

    Example:
        >>> copy_losses(scores, 0, np.array([3, 17]), "clean", shard).num_losses
        25000
    """
    dataset, manifest = scores.dataset, scores.files.manifest
    record = manifest.sidecars[shard_index]
    old = dataset.manifest.shards[shard_index]
    data = _read(scores.files, record)
    stored = decode_listed(data, record, scores.files, old)
    file = sidecar_name(shard.file, stored.teacher)
    made = replace(record, file=file, shard=shard.file)
    if len(removed):
        index = dataset.read_index(shard_index, with_names=True)
        if len(stored.starts) != len(index) + 1:
            raise DamagedShardError(
                f"{record.file} has losses of {len(stored.starts) - 1} documents, {old.file} has "
                f"{len(index)}: {_remedy(scores.files)}"
            )
        kept = np.delete(np.arange(len(index)), removed)
        stored = take_losses(stored, kept, shard_sha256=shard.sha256)
        pieces = ContextRule.from_json(manifest.rule.context).pieces(take_documents(index, kept))
        # A condition that left documents unscored left them without losses.
        pieces = pieces.of_documents(np.diff(stored.starts) > 0)
        data = encode_sidecar(stored)
        made = describe_sidecar(data, stored, shard_record=shard, pieces=pieces)
    with storage.open_to_write(storage.join(output, file)) as sink:
        sink.write(data)
    return made


def write_score_manifest(
    scores: Scores, sidecars: Sequence[SidecarRecord], made: Manifest, output: str, *, scratch: str
) -> None:
    """Write what lists the new dataset's sidecars.

    Args:
        scores: of the old dataset.
        sidecars: one for each shard of the new one.
        made: the new dataset's manifest.
        output: its folder.
        scratch: for local files while they are written.
    """
    rule = scores.files.manifest.rule
    view = scores.dataset.view
    seen = made if view is None else view_manifest(made, view.name)
    manifest = ScoreManifest(seen.fingerprint, rule, scores.files.manifest.source, tuple(sidecars))
    path = storage.join(output, score_manifest_name(rule.fingerprint))
    storage.write_atomically(path, encode_score_manifest(manifest), scratch=scratch)


def say_other_length(scores: Scores, made: Manifest) -> str:
    """Return what to give runs whose rows would no longer have the scored length by default.

    That default follows from the shards that a dataset began with, and those are others now.

    Returns:
        A line; "" where the default is the same as before, or was not what was scored.
    """
    rule = ContextRule.from_json(scores.files.manifest.rule.context)
    view = scores.dataset.view
    seen = made if view is None else view_manifest(made, view.name)
    if rule.seq_length is None:
        return ""
    before = suggest_teacher_seq_length(scores.dataset.manifest, rule.seq_length)
    now = suggest_teacher_seq_length(seen, rule.seq_length)
    if rule.teacher_seq_length == now or rule.teacher_seq_length != before:
        return ""
    return (
        f"losses of {score_manifest_name(scores.teacher)} are of rows of {before} teacher tokens, "
        f"and the new dataset's have {now} by default: give --teacher-seq-length {before}\n"
    )


def _read(scores: ScoreFiles, record: SidecarRecord) -> bytes:
    url = scores.sidecar(record).url
    try:
        with fsspec.open(url, "rb") as file:
            return bytes(file.read())
    except FileNotFoundError as error:
        raise DamagedShardError(f"{url} is missing: {_remedy(scores)}") from error


def _remedy(scores: ScoreFiles) -> str:
    return f"run vocag score again, or delete {scores.path} to compact without these losses"
