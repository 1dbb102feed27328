"""Check the teachers' losses beside a dataset: is each what its score manifest says it is?"""

from __future__ import annotations

import secrets
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.sidecars import DocumentTokens, describe_sidecar, read_teacher_tokens
from pipeline.scoring.stored_losses import ScoreFiles, list_scores, require_dataset
from pipeline.scoring.teacher_files import find_teacher
from pipeline.validate.findings import Findings
from pipeline.validate.shard import describe, open_file
from schemas.errors import DatasetError
from schemas.index import ShardIndex
from schemas.manifest import ShardRecord
from schemas.sidecar import LARGEST_LOSS, ShardLosses, SidecarRecord, decode_sidecar

if TYPE_CHECKING:
    from pipeline.scoring.engines.transformers import Scorer

CHECK = "teacher_losses"
SAMPLED_DOCUMENTS = 16
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Nats beside fp16's rounding by which a loss may differ when it is computed in other batches."""

_FP16_STEP = 2.0**-10


def check_scores(dataset: Dataset, *, teacher: str | None, seed: int | None = None) -> Findings:
    """Check every teacher's score manifest and sidecars beside a dataset.

    Args:
        dataset: beside which they lie.
        teacher: folder, repository or .gguf file to score a random sample of documents again with;
            None checks what needs no model.
        seed: of that sample; None: another one each time, which a note names.

    Returns:
        The findings; its notes say what could not be checked, and what was scored again.

    Raises:
        DatasetError: `teacher` is given and none of the scores are its.

    Example:
        >>> check_scores(open_dataset("aligned"), teacher=None).found
        []
    """
    findings = Findings()
    try:
        found = list_scores(dataset.location)
    except DatasetError as error:
        findings.add(CHECK, str(error))
        return findings
    sound = [scores for scores in found if _check_one(scores, dataset, findings)]
    if teacher is not None:
        seed = secrets.randbelow(1 << 32) if seed is None else seed
        _score_again(
            teacher, [s for s in sound if not findings.found], dataset, found, findings, seed
        )
    return findings


def _check_one(scores: ScoreFiles, dataset: Dataset, findings: Findings) -> bool:
    """Check one teacher's scores; return whether sidecars could be read at all."""
    try:
        require_dataset(scores, dataset.manifest)
        rule = ContextRule.from_json(scores.manifest.rule.context)
    except DatasetError as error:
        findings.add(CHECK, str(error))
        return False
    shards = dataset.manifest.shards
    for number, record in enumerate(scores.manifest.sidecars):
        try:
            index = dataset.read_index(number)
            data = _read(scores.location, record)
            losses = decode_sidecar(data, where=record.file)
        except OSError as error:
            findings.add(CHECK, f"{record.file} can't be read: {describe(error)}")
        except DatasetError as error:
            findings.add(CHECK, str(error))
        else:
            of_shard = Findings(record.shard)
            for message in _contradictions(
                data,
                losses,
                record=record,
                scores=scores,
                shard_record=shards[number],
                index=index,
                pieces=rule.pieces(index),
                rule=rule,
            ):
                of_shard.add(CHECK, f"{record.file}: {message}")
            findings.take_over(of_shard)
    return True


def _contradictions(
    data: bytes,
    losses: ShardLosses,
    *,
    record: SidecarRecord,
    scores: ScoreFiles,
    shard_record: ShardRecord,
    index: ShardIndex,
    pieces: Pieces,
    rule: ContextRule,
) -> list[str]:
    """Return everything about a sidecar that is not as manifest, index and rule say."""
    found = []
    if sha256(data).hexdigest() != record.sha256 or len(data) != record.num_bytes:
        found.append(f"{len(data)} bytes with another SHA-256 than {scores.path} says")
    if losses.teacher != scores.manifest.rule.fingerprint:
        found.append(f"the losses are of teacher {losses.teacher[:16]}…")
    if losses.shard_sha256 != shard_record.sha256:
        found.append(f"another tar was scored, of SHA-256 {losses.shard_sha256[:16]}…")
    if not np.array_equal(np.diff(losses.starts), index.num_teacher_tokens):
        return [*found, "documents have other numbers of losses than of teacher tokens"]
    expected = _expected(losses, pieces, rule)
    bad = np.flatnonzero(np.isnan(losses.losses) == expected)
    if len(bad):
        document = int(np.searchsorted(losses.starts, bad[0], "right")) - 1
        what = "has no loss" if expected[bad[0]] else "has a loss without a context"
        place = bad[0] - losses.starts[document]
        found.append(f"token {place} of document {document} {what}, and {len(bad) - 1} more")
    outside = np.flatnonzero((losses.losses < 0) | (losses.losses > LARGEST_LOSS))
    if len(outside):
        found.append(f"{len(outside)} losses such as {losses.losses[outside[0]]} are impossible")
    if (
        not found
        and describe_sidecar(data, losses, shard_record=shard_record, pieces=pieces) != record
    ):
        found.append("counts, sum or contexts differ from those that its score manifest says")
    return found


def _expected(losses: ShardLosses, pieces: Pieces, rule: ContextRule) -> NDArray[np.bool_]:
    """Return which tokens must have a loss, bool [M]."""
    expected = np.ones(len(losses.losses), np.bool_)
    for continues in (False, True):
        if rule.context_token(continues=continues) is None:
            bare = (pieces.continues == continues) & (pieces.scored_from == pieces.start)
            expected[losses.starts[pieces.document[bare]] + pieces.start[bare]] = False
    return expected


def _score_again(
    teacher: str,
    sound: list[ScoreFiles],
    dataset: Dataset,
    found: list[ScoreFiles],
    findings: Findings,
    seed: int,
) -> None:
    from pipeline.scoring.engines.transformers import default_device, load_scorer

    weights = find_teacher(teacher)
    own = [s for s in found if s.manifest.rule.weights_sha256 == weights.sha256]
    if not own:
        raise DatasetError(
            f'none of the {len(found)} scores in {dataset.location} are of teacher "{teacher}": '
            "its weights or configuration are others; name the model that scored them"
        )
    for scores in own:
        if scores.manifest.rule.engine is not None:
            findings.note(
                f"{scores.path} was not scored again: {scores.manifest.rule.engine.name} gave it, "
                "and its kernels or quantization round otherwise than transformers"
            )
            continue
        if scores not in sound:
            findings.note(f"{scores.path} was not scored again: with other findings it can't agree")
            continue
        rule, device = scores.manifest.rule, default_device()
        scorer = load_scorer(
            str(weights.path), ContextRule.from_json(rule.context), dtype=rule.dtype, device=device
        )
        sampled, message = _compare_sample(scores, dataset, scorer, Random(seed))
        if message:
            findings.add(CHECK, f"{scores.path}: {message}")
        findings.note(f"{scores.path}: scored {sampled} again on {device}, chosen by --seed {seed}")


def _compare_sample(
    scores: ScoreFiles, dataset: Dataset, scorer: Scorer, choose: Random
) -> tuple[str, str]:
    """Score some documents of a random shard again; return which, and what differs."""
    number = choose.choice([n for n, s in enumerate(dataset.manifest.shards) if s.num_documents])
    record = scores.manifest.sidecars[number]
    index = dataset.read_index(number, with_names=True)
    stored = decode_sidecar(_read(scores.location, record), where=record.file)
    chosen = sorted(choose.sample(range(len(index)), min(SAMPLED_DOCUMENTS, len(index))))
    pieces = scorer.rule.pieces(index)
    kept = np.isin(pieces.document, chosen)
    sample = Pieces(
        pieces.document[kept],
        pieces.start[kept],
        pieces.scored_from[kept],
        pieces.stop[kept],
        pieces.continues[kept],
    )
    tokens: DocumentTokens = read_teacher_tokens(dataset, number, index)
    again = scorer.score(tokens, sample, names=index.document_id).losses
    then = stored.losses.astype(np.float32)
    scored = ~np.isnan(again)
    differences = np.abs(np.minimum(again, LARGEST_LOSS) - then)[scored]
    allowed = TOLERANCES[scores.manifest.rule.dtype] + _FP16_STEP * then[scored]
    num_bad = int(np.count_nonzero(~(differences <= allowed)))
    sampled = f"{len(chosen)} documents of {record.shard}"
    if not num_bad:
        return sampled, ""
    return sampled, (
        f"{num_bad} of {len(differences)} losses of {sampled} "
        f"differ when they are scored again, by up to {np.nanmax(differences):.3g} nats: another "
        "teacher gave them, or they were altered; run beam_jobs.score again"
    )


def _read(location: str, record: SidecarRecord) -> bytes:
    with open_file(location, record.file) as file:
        return bytes(file.read())
