"""Losses of teachers that never ran, next to a dataset, and what is known of its documents.

The oracle adds losses one by one, of samples that it decodes, and reads neither index nor table.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.document_scores import make_document_scores
from pipeline.dataset.files import open_dataset
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.sidecars import ShardToScore
from schemas.distribution_rule import DistributionRule
from schemas.document import decode_document
from schemas.document_score_table import document_scores_name
from schemas.sidecar import (
    ScoreManifest,
    TeacherRule,
    decode_sidecar,
    encode_score_manifest,
    score_manifest_name,
    to_fp16,
)
from schemas.stored_distributions import TopTokens

Scores = dict[str, float | None]
Losses = Callable[[str, int], NDArray[np.float64]]


def write_scores(
    folder: Path,
    source: str,
    losses: Losses,
    *,
    where: str = "",
    with_tables: bool = True,
    distributions: DistributionRule | None = None,
) -> ScoreManifest:
    """Write the scores of a teacher that gives a document of an id so many losses, in nats.

    What it expects next is one and the same at all positions.
    """
    dataset = open_dataset(folder)
    context = ContextRule.of_rows(PackingRules.of_dataset(dataset.manifest, seq_length=64))
    weights = sha256(source.encode()).hexdigest()
    tokenizer = dataset.manifest.teacher.sha256
    rule = TeacherRule(weights, "float32", tokenizer, context.to_json(), None, where, distributions)
    records = []
    for number in range(len(dataset.manifest.shards)):
        shard = ShardToScore.open(select_documents(dataset, where), number, context)
        counts = zip(shard.index.document_id, shard.lengths.tolist(), strict=True)
        parts = [losses(name, count) for name, count in counts]
        given = to_fp16(np.concatenate([np.empty(0), *parts]).astype(np.float32))
        top = None
        if distributions is not None:
            top = TopTokens.empty(np.append(0, np.cumsum(shard.lengths)), distributions)
            ids = np.tile(np.arange(distributions.top_k), (len(top.ids), 1)) + 200
            top.put(np.arange(len(ids)), ids, np.full(ids.shape, np.log(0.3)))
        data, record = shard.make_sidecar(given.astype(np.float32), rule.fingerprint, top)
        (folder / record.file).write_bytes(data)
        if with_tables:
            own = decode_sidecar(data, at=record.file)
            table = make_document_scores(own, shard.index, record.sha256)
            (folder / document_scores_name(record.file)).write_bytes(table)
            record = replace(record, documents_sha256=sha256(table).hexdigest())
        records.append(record)
    scores = ScoreManifest(dataset.manifest.fingerprint, rule, source, tuple(records))
    path = folder / score_manifest_name(rule.fingerprint)
    path.write_bytes(encode_score_manifest(scores))
    return scores


def summarise(losses: list[float], num_bytes: int) -> Scores:
    """Return one document's numbers; losses are in nats, NaN where a token has none."""
    later = [loss for place, loss in enumerate(losses) if place >= 32 and not math.isnan(loss)]
    known = [loss for loss in losses if not math.isnan(loss)]
    windows = [known[i : i + 64] for i in range(max(1, len(known) - 63))]
    density = len(losses) / num_bytes if num_bytes else math.nan

    def bits(values: list[float]) -> float:
        return math.fsum(values) / math.log(2)

    nothing = math.nan
    found = {
        "bits_per_byte": bits(known) / num_bytes if known and num_bytes else nothing,
        "bits_per_byte_later": bits(later) / len(later) * density if later else nothing,
        "largest_window": max(bits(w) / len(w) for w in windows) * density if known else nothing,
        "tokens_per_byte": density,
    }
    return {name: None if math.isnan(value) else _single(value) for name, value in found.items()}


def document_scores(folder: Path, scores: ScoreManifest) -> dict[str, Scores]:
    """Return what a teacher's losses say of each document, by id, ranks included."""
    dataset, found, lengths = open_dataset(folder), dict[str, Scores](), dict[str, int]()
    for number, record in enumerate(scores.sidecars):
        stored = decode_sidecar((folder / record.file).read_bytes(), at=record.file)
        index = dataset.read_index(number, with_names=True)
        for place, sample in dataset.samples(number, index, with_removed=True):
            document = decode_document(sample)
            own = stored.losses[stored.starts[place] : stored.starts[place + 1]]
            # A document that was not scored has tokens all the same.
            losses = own.tolist() or [math.nan] * len(document.teacher.input_ids)
            lengths[document.document_id] = document.num_text_bytes
            found[document.document_id] = summarise(losses, document.num_text_bytes)
    return {name: {**own, **_ranks(name, found, lengths)} for name, own in found.items()}


def _ranks(name: str, found: dict[str, Scores], lengths: dict[str, int]) -> Scores:
    bits = {n: _half(own["bits_per_byte"]) for n, own in found.items() if own["bits_per_byte"]}
    if name not in bits:
        return {"rank": None, "bits_per_byte_rank": None}
    similar = [n for n in bits if lengths[n].bit_length() == lengths[name].bit_length()]
    cheaper = sum(bits[n] < bits[name] for n in similar)
    equal = sum(bits[n] == bits[name] for n in similar)
    up_to = sum(lengths[n] for n in bits if bits[n] <= bits[name])
    return {
        "rank": up_to / sum(lengths[n] for n in bits),
        "bits_per_byte_rank": (cheaper + equal / 2) / len(similar),
    }


def _single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _half(value: float | None) -> float:
    return float(struct.unpack("e", struct.pack("e", value))[0])
