"""Check teachers' losses against their score manifests."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.command_line.failures import hinted
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.conditions import WhereError
from pipeline.dataset.dataset_reading import read_whole
from pipeline.dataset.document_scores import make_document_scores
from pipeline.dataset.files import Dataset
from pipeline.dataset.score_files import (
    SCORE_AGAIN,
    ScoreFiles,
    find_unlisted,
    list_scores,
    scored_generation,
    scores_of,
    scoring_command,
)
from pipeline.drawing.formatting import format_plural
from pipeline.models.teacher_files import TeacherFiles, find_teacher
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.sidecars import ShardToScore
from pipeline.validate.entry_checks import (
    compare_draws,
    compare_entries,
    contradicting_entries,
    contradicting_places,
)
from pipeline.validate.findings import Findings
from pipeline.validate.shard import describe
from schemas.document_score_table import ALL_COLUMNS, decode_document_scores, document_scores_name
from schemas.errors import DatasetError, SchemaVersionError
from schemas.sidecar import LARGEST_LOSS, ShardLosses, SidecarRecord, decode_sidecar

if TYPE_CHECKING:
    from pipeline.scoring.engines.transformers import Scorer

CHECK = "teacher_losses"
SAMPLED_DOCUMENTS = 16
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Nats by which a loss computed in other batches may differ, besides fp16's rounding."""

_FP16_STEP = 2.0**-10


def find_scoring_teacher(teacher: str, location: str) -> TeacherFiles:
    """Return a teacher that scored a dataset; DatasetError or ValueError for another.

    Of unreadable scores, which `check_scores` finds, any teacher may be one.
    """
    weights = find_teacher(teacher)
    try:
        found = list_scores(location)
    except DatasetError:
        return weights
    if not found:
        missing = DatasetError(
            f"nothing has scored {location}: run vocag score first, or leave out --teacher"
        )
        raise hinted(missing, scoring_command(location, teacher))
    if not _scores_by(weights, found):
        raise DatasetError(
            f'none of the {len(found)} scores in {location} are by teacher "{teacher}": '
            "its weights or configuration differ; name the model that scored them"
        )
    return weights


def check_scores(dataset: Dataset, *, teacher: TeacherFiles | None) -> Findings:
    """Check the score manifests and sidecars next to a dataset.

    `teacher`, from `find_scoring_teacher`, scores a random sample again.
    """
    findings = Findings()
    try:
        found = list_scores(dataset.location)
    except DatasetError as error:
        findings.add(CHECK, str(error))
        return findings
    for scores in found:
        _check_one(scores, dataset, findings)
    if unlisted := find_unlisted(dataset.location, found):
        findings.add(
            CHECK,
            f"{len(unlisted)} sidecars, such as {unlisted[0]}, are in no score manifest: scoring "
            "has not ended, or it is lost; run vocag score again, or delete them",
        )
    if teacher is not None:
        _score_again(teacher, dataset, found, findings)
    return findings


def _check_one(scores: ScoreFiles, dataset: Dataset, findings: Findings) -> None:
    try:
        scored = scored_generation(scores, dataset)
        scores = scores_of(scores, scored)
        rule = ContextRule.from_json(scores.manifest.rule.context)
        documents = select_documents(scored, scores.manifest.rule.where)
    except (DatasetError, WhereError) as error:
        findings.add(CHECK, str(error))
        return
    shards = scored.manifest.shards
    if len(shards) < len(dataset.manifest.shards):
        findings.note(
            f"{scores.path} has losses of {len(shards)} of {len(dataset.manifest.shards)} shards: "
            "run vocag score again for those that came since"
        )
    no_tables = list[str]()
    for number, record in enumerate(scores.manifest.sidecars):
        of_shard = Findings(record.shard)
        try:
            shard = ShardToScore.open(documents, number, rule)
            messages = _contradictions(scores, record, shard, rule)
            for message in messages or _table_contradictions(scores, record, shard, no_tables):
                of_shard.add(CHECK, f"{record.file}: {message}")
        except OSError as error:
            text = f"{record.file} can't be read: {describe(error, SCORE_AGAIN)}"
            findings.add(CHECK, text)
        except DatasetError as error:
            findings.add(CHECK, str(error))
        findings.take_over(of_shard)
    if no_tables:
        findings.note(
            f"{format_plural(len(no_tables), 'table')} of documents' scores, such as "
            f"{no_tables[0]}: missing or of another version, and made from the losses when needed"
        )


def _contradictions(
    scores: ScoreFiles, record: SidecarRecord, shard: ShardToScore, rule: ContextRule
) -> list[str]:
    data = read_whole(f"{scores.location}/{record.file}")
    losses = decode_sidecar(data, at=record.file)
    found = contradicting_entries(losses, scores.manifest.rule.distributions, at=record.file)
    if sha256(data).hexdigest() != record.sha256 or len(data) != record.num_bytes:
        found.append(f"{len(data)} bytes whose SHA-256 isn't the one in {scores.path}")
    if losses.teacher != scores.manifest.rule.fingerprint:
        found.append(f"the losses are of teacher {losses.teacher[:16]}…")
    if losses.shard_sha256 != shard.record.sha256:
        found.append(f"a different tar was scored, of SHA-256 {losses.shard_sha256[:16]}…")
    if not np.array_equal(np.diff(losses.starts), shard.lengths):
        return [*found, "documents' numbers of losses differ from their teacher tokens to score"]
    expected = _expected(losses, shard.pieces, rule)
    if losses.learned is not None:
        of_chats = shard.read_tokens().learned
        if of_chats is None or not np.array_equal(losses.learned, of_chats):
            found.append("losses are of other tokens than those that the chats learn")
        expected &= losses.learned
    if scores.manifest.rule.learned_only != (losses.learned is not None):
        found.append("the rule says otherwise whether only learned tokens' losses are stored")
    bad = np.flatnonzero(np.isnan(losses.losses) == expected)
    if len(bad):
        document = int(np.searchsorted(losses.starts, bad[0], "right")) - 1
        what = "has no loss" if expected[bad[0]] else "has a loss without a context"
        place = bad[0] - losses.starts[document]
        found.append(f"token {place} of document {document} {what}, and {len(bad) - 1} more")
    outside = np.flatnonzero((losses.losses < 0) | (losses.losses > LARGEST_LOSS))
    if len(outside):
        found.append(f"{len(outside)} losses such as {losses.losses[outside[0]]} are impossible")
    if not found and losses.entries is not None:
        found += contradicting_places(
            losses.entries, expected, losses.starts, of_ends=losses.learned is None
        )
    if not found and shard.describe_sidecar(data, losses) != replace(record, documents_sha256=None):
        found.append("counts, sum or contexts differ from those that its score manifest says")
    return found


def _table_contradictions(
    scores: ScoreFiles, record: SidecarRecord, shard: ShardToScore, missing: list[str]
) -> list[str]:
    name = document_scores_name(record.file)
    try:
        data = read_whole(f"{scores.location}/{name}")
    except FileNotFoundError:
        missing.append(name)
        return []
    if record.documents_sha256 not in (None, sha256(data).hexdigest()):
        return [f"{name}: its SHA-256 isn't the one in {scores.path}"]
    try:
        own = decode_document_scores(data, ALL_COLUMNS, sidecar_sha256=record.sha256, at=name)
    except SchemaVersionError:  # of no use, and no harm: it is made anew when it is read
        missing.append(name)
        return []
    losses = decode_sidecar(read_whole(f"{scores.location}/{record.file}"), at=record.file)
    made = make_document_scores(losses, shard.index, record.sha256)
    same = decode_document_scores(made, ALL_COLUMNS, sidecar_sha256=record.sha256, at=name)
    differing = [
        column
        for column, values in own.items()
        if not np.array_equal(values, same[column], equal_nan=values.dtype.kind == "f")
    ]
    return [f"{name}: {', '.join(differing)} don't follow from the losses"] if differing else []


def _expected(losses: ShardLosses, pieces: Pieces, rule: ContextRule) -> NDArray[np.bool_]:
    """Return which tokens must have a loss, bool [M]."""
    expected = np.ones(len(losses.losses), np.bool_)
    for continues in (False, True):
        if rule.context_token(continues=continues) is None:
            bare = pieces.continues == continues
            expected[losses.starts[pieces.document[bare]] + pieces.start[bare]] = False
    return expected


def _scores_by(teacher: TeacherFiles, found: list[ScoreFiles]) -> list[ScoreFiles]:
    return [each for each in found if each.manifest.rule.weights_sha256 == teacher.sha256]


def _score_again(
    teacher: TeacherFiles, dataset: Dataset, found: list[ScoreFiles], findings: Findings
) -> None:
    from pipeline.models.devices import find_device
    from pipeline.scoring.engines.transformers import load_scorer

    if findings.found:
        findings.note("nothing was scored again: with other findings it can't agree")
        return
    for scores in _scores_by(teacher, found):
        if scores.manifest.rule.engine is not None:
            findings.note(
                f"{scores.path} was not scored again: {scores.manifest.rule.engine.name} gave it, "
                "and its kernels or quantization round differently from transformers"
            )
            continue
        rule, device = scores.manifest.rule, str(find_device())
        scorer = load_scorer(
            str(teacher.path),
            ContextRule.from_json(rule.context),
            dtype=rule.dtype,
            distributions=rule.distributions,
        )
        sampled, message = _compare_sample(scores, dataset, scorer)
        if message:
            findings.add(CHECK, f"{scores.path}: {message}")
        findings.note(f"{scores.path}: scored {sampled} again on {device}")


def _compare_sample(scores: ScoreFiles, dataset: Dataset, scorer: Scorer) -> tuple[str, str]:
    number = random.choice([n for n, s in enumerate(scores.manifest.sidecars) if s.num_tokens])
    record = scores.manifest.sidecars[number]
    data = read_whole(f"{scores.location}/{record.file}")
    stored = decode_sidecar(data, at=record.file)
    scored_documents = np.flatnonzero(np.diff(stored.starts)).tolist()
    chosen = sorted(random.sample(scored_documents, min(SAMPLED_DOCUMENTS, len(scored_documents))))
    shard = ShardToScore.open(select_documents(dataset), number, scorer.rule)
    sample = shard.pieces.of_documents(np.isin(np.arange(len(shard.index)), chosen))
    tokens = shard.read_tokens(np.diff(stored.starts) > 0)
    scored = scorer.score(tokens, sample, names=shard.index.document_id)
    dtype, sampled = scores.manifest.rule.dtype, f"{len(chosen)} documents of {record.shard}"
    message = _compare_losses(scored.losses, stored, dtype, sampled)
    if not message and scored.top is not None and stored.entries is not None:
        if stored.learned is not None:
            scored.top.ids[tokens.unlearned_positions()] = -1
        again = scored.top.pack(tokens.starts)
        given = again, stored.entries, chosen
        message = compare_entries(*given, tolerance=TOLERANCES[dtype])
        message = message or compare_draws(*given, tolerance=TOLERANCES[dtype])
    return sampled, message


def _compare_losses(
    again: NDArray[np.float32], stored: ShardLosses, dtype: str, sampled: str
) -> str:
    then = stored.losses.astype(np.float32)
    scored = ~np.isnan(again)
    if stored.learned is not None:
        scored &= stored.learned
    differences = np.abs(np.minimum(again, LARGEST_LOSS) - then)[scored]
    allowed = TOLERANCES[dtype] + _FP16_STEP * then[scored]
    num_bad = int(np.count_nonzero(~(differences <= allowed)))
    if not num_bad:
        return ""
    return (
        f"{num_bad} of {len(differences)} losses of {sampled} "
        f"differ when they are scored again, by up to {np.nanmax(differences):.3g} nats: another "
        "teacher gave them, or they were altered; run vocag score again"
    )
