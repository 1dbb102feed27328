"""Check samples against the index, the vocabularies and themselves."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from pipeline.alignment.quality import AlignmentStatistics, DocumentQuality, measure_documents
from pipeline.alignment.token_spans import find_failures
from pipeline.batches import AlignedBatch
from pipeline.dataset.tokenizers import Side
from pipeline.tokenization import Tokenizer
from pipeline.validate.arrays import (
    find_foreign_content,
    find_other_tokens,
    find_unknown_ids,
    find_unsound_offsets,
    find_wrong_cuts,
    find_wrong_spans,
    stack_cuts,
    stack_documents,
)
from pipeline.validate.chat_checks import (
    ANOTHER_RELEASE,
    RENDERED_AGAIN,
    Speakers,
    counts_of,
    find_other_labels,
    find_other_rendering,
    find_wrong_parts,
    renderings_of,
    with_origins,
)
from pipeline.validate.findings import Findings
from pipeline.validate.tar import Sample
from schemas.document import AlignedDocument, decode_document, decode_tensors, document_key
from schemas.index import ShardIndex
from schemas.manifest import Manifest

SIDES: tuple[Side, Side] = ("student", "teacher")
_FP32_SUM = 1e-6
"""Relative error of rounding to fp32; the order of a sum changes less."""


@dataclass(frozen=True)
class _Decoded:
    """A sample, its place in the index, and which sides store bytes per token."""

    place: int
    document: AlignedDocument
    tiled: tuple[bool, bool]


def check_samples(
    samples: Sequence[Sample],
    index: ShardIndex,
    manifest: Manifest,
    findings: Findings,
    *,
    tokenizers: Mapping[Side, Tokenizer] | None,
    speakers: Speakers | None,
) -> AlignmentStatistics:
    """Check all rules about the content of a shard's samples.

    `tokenizers` tokenize kept text again, `speakers` render some chats again. The statistics cover
    samples with sound offsets and spans.
    """
    decoded = [entry for s in samples if (entry := _decode(s, index, findings)) is not None]
    entries = [entry for entry in decoded if _agrees(entry, index, manifest, findings)]
    if manifest.chats is not None:
        entries = _check_chats(entries, speakers, index, findings)
    batch = stack_documents([entry.document for entry in entries])
    unsound = _check_tokens(batch, entries, index, manifest, findings)
    batch, entries = _without(unsound, batch, entries)
    wrong_spans = dict(find_wrong_spans(batch))
    for d, message in wrong_spans.items():
        findings.add("spans", message, key=index.key[entries[d].place])
    cuts = stack_cuts(index, [entry.place for entry in entries])
    for d, message in find_wrong_cuts(batch, cuts):
        findings.add("cut_points", message, key=index.key[entries[d].place])
    if tokenizers is not None:
        _check_tokenization(entries, tokenizers, speakers, index, findings)
    batch, entries = _without(wrong_spans, batch, entries)
    statistics, quality = measure_documents(batch)
    _check_quality(entries, quality, index, findings)
    num_text_bytes = sum(entry.document.num_text_bytes for entry in entries)
    return replace(statistics, num_text_bytes=num_text_bytes)  # texts may not have been kept


def _decode(sample: Sample, index: ShardIndex, findings: Findings) -> _Decoded | None:
    try:
        tensors, _ = decode_tensors(sample.payload)
        document = decode_document(sample.payload)
    # TypeError and AttributeError: the header is JSON, but not of a safetensors file's shape.
    except (ValueError, TypeError, AttributeError) as error:
        findings.add("sample", str(error), key=index.key[sample.place])
        return None
    student, teacher = (f"{side}.token_bytes" in tensors for side in SIDES)
    return _Decoded(sample.place, document, (student, teacher))


def _check_chats(
    entries: Sequence[_Decoded], speakers: Speakers | None, index: ShardIndex, findings: Findings
) -> list[_Decoded]:
    sound = []
    for entry in entries:
        messages, key = [*find_wrong_parts(entry.document)], index.key[entry.place]
        for message in messages:
            findings.add("chats", message, key=key)
        if messages:
            continue
        sound.append(entry)
        if speakers is None:
            continue
        for name, count in counts_of(entry.document, speakers).items():
            claim = int(index.chats[name][entry.place]) if index.chats else -1
            if claim != count:
                findings.add("counts", f"{name} is {count}, the index says {claim}", key=key)
        if len(sound) <= RENDERED_AGAIN:
            other = find_other_rendering(entry.document, speakers)
            if other is not None:
                findings.add("chats", f"{other}; {ANOTHER_RELEASE}", key=key)
    return sound


def _agrees(entry: _Decoded, index: ShardIndex, manifest: Manifest, findings: Findings) -> bool:
    """Report contradictions to the index; return whether lengths agree."""
    document, place, key = entry.document, entry.place, index.key[entry.place]
    if document.document_id != index.document_id[place]:
        found, claim = document.document_id, index.document_id[place]
        findings.add("key", f'the sample is document "{found}", the index says "{claim}"', key=key)
    elif document_key(document.document_id) != key:
        expected = document_key(document.document_id)
        findings.add("key", f'document "{document.document_id}" has the key {expected}', key=key)
    is_kept, said = document.text is not None, manifest.configuration.get("keep_text")
    if isinstance(said, bool) and said != is_kept:
        text = f"its text is {'' if is_kept else 'not '}kept, the manifest says keep_text {said}"
        findings.add("text", text, key=key)
    if document.text is not None:
        _check_text(document, document.text, key, findings)
    counts = {
        "num_text_bytes": document.num_text_bytes,
        "num_student_tokens": len(document.student),
        "num_teacher_tokens": len(document.teacher),
    }
    claims = {name: int(getattr(index, name)[place]) for name in counts}
    for name in (name for name in counts if counts[name] != claims[name]):
        findings.add("counts", f"{name} is {counts[name]}, the index says {claims[name]}", key=key)
    return counts == claims


def _check_text(document: AlignedDocument, text: bytes, key: str, findings: Findings) -> None:
    if len(text) != document.num_text_bytes:
        claim = document.num_text_bytes
        findings.add("text", f"kept text has {len(text)} bytes, the sample says {claim}", key=key)
    found, claimed = sha256(text).hexdigest(), document.text_sha256
    if found != claimed:
        findings.add(
            "text", f"kept text has SHA-256 {found[:16]}…, the sample says {claimed[:16]}…", key=key
        )


def _check_tokens(
    batch: AlignedBatch,
    entries: Sequence[_Decoded],
    index: ShardIndex,
    manifest: Manifest,
    findings: Findings,
) -> set[int]:
    """Check ids and offsets; return documents that can't be aligned."""
    unsound: set[int] = set()
    num_text_bytes = np.array([entry.document.num_text_bytes for entry in entries], np.int64)
    for place, side in enumerate(SIDES):
        tokens = getattr(batch, side)
        must_tile = np.array([entry.tiled[place] for entry in entries], np.bool_)
        for d, message in find_unknown_ids(tokens, getattr(manifest, side).vocab_size):
            findings.add("input_ids", f"{side} {message}", key=index.key[entries[d].place])
        for d, message in find_unsound_offsets(tokens, num_text_bytes, must_tile):
            findings.add("offsets", f"{side} {message}", key=index.key[entries[d].place])
            unsound.add(d)
    for d, message in find_failures(batch.student, batch.teacher).items():
        findings.add("offsets", message, key=index.key[entries[d].place])
        unsound.add(d)
    return unsound


def _without(
    excluded: Collection[int], batch: AlignedBatch, entries: list[_Decoded]
) -> tuple[AlignedBatch, list[_Decoded]]:
    if not excluded:
        return batch, entries
    rest = [entry for d, entry in enumerate(entries) if d not in excluded]
    return stack_documents([entry.document for entry in rest]), rest


def _check_tokenization(
    entries: Iterable[_Decoded],
    tokenizers: Mapping[Side, Tokenizer],
    speakers: Speakers | None,
    index: ShardIndex,
    findings: Findings,
) -> None:
    kept = [entry for entry in entries if entry.document.text is not None]
    findings.num_tokenized_again += len(kept)
    batch = stack_documents([entry.document for entry in kept])
    documents = [entry.document for entry in kept]
    for side in SIDES:
        tokenizer, texts = tokenizers[side], renderings_of(documents, side)
        fresh = tokenizer.tokenize_batch(texts)
        own = with_origins(fresh, documents, side)
        other = dict(find_other_tokens(getattr(batch, side), own))
        foreign = dict(find_foreign_content(fresh, texts, tokenizer))
        for d, message in {**foreign, **other}.items():
            findings.add("tokenization", f"{side} {message}", key=index.key[kept[d].place])
        if side == "student" and speakers is not None:
            for d, message in find_other_labels(documents, fresh, speakers):
                found = f"{message}; {ANOTHER_RELEASE}"
                findings.add("chats", found, key=index.key[kept[d].place])


def _check_quality(
    entries: Sequence[_Decoded], quality: DocumentQuality, index: ShardIndex, findings: Findings
) -> None:
    for d, entry in enumerate(entries):
        key, place = index.key[entry.place], entry.place
        found, claim = int(quality.num_mapped[d]), int(index.num_mapped[place])
        if found != claim:
            findings.add("counts", f"num_mapped is {found}, the index says {claim}", key=key)
        iou, said = float(quality.byte_iou_sum[d]), float(index.byte_iou_sum[place])
        if not math.isclose(iou, said, rel_tol=_FP32_SUM):
            text = f"byte_iou_sum is {iou:.6g}, the index says {said:.6g}"
            findings.add("counts", text, key=key)
