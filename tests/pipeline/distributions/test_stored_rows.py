"""Distributions in rows, as a sidecar holds them, through cuts and damage."""

import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from pipeline.dataset.files import open_dataset
from pipeline.dataset.score_files import list_scores
from pipeline.dataset.webdataset_documents import decoded_documents
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.packing.kernels import FORCED
from pipeline.streaming import dataset_rows, next_tokens
from schemas.document import AlignedDocument, Tokens
from tests.support.datasets import byte_level, flip
from tests.support.mapped_distributions import (
    ByteTokenizer,
    SeededLosses,
    mapped_by_label,
    readable_entries,
)
from tests.support.scored_data import SEQ_LENGTH
from tests.support.streaming_data import STUDENT_EOS, TEACHER_EOS, brute_force_spans, write_dataset
from tests.support.teaching import open_rows

ID_BITS = 9  # of 480 tokens


def read(root, **options):
    given = {"seq_length": SEQ_LENGTH, "stored_losses": "", "with_distributions": True}
    rows = open_rows(root / "data", **given, **options)
    return rows, rows.__getitems__(range(len(rows)))


def stored_positions(folder):
    """Yield each document's (ids, probabilities) of every position, unpacked bit by bit."""
    (scores,) = list_scores(str(folder))
    for record in scores.manifest.sidecars:
        tensors = safetensors.numpy.load_file(folder / record.file)
        bits = np.unpackbits(tensors["entry_ids"], bitorder="little")
        log_probs = tensors["entry_log_probs"].astype(np.float64)
        ids = bits[: len(log_probs) * ID_BITS].reshape(-1, ID_BITS) @ (1 << np.arange(ID_BITS))
        ends = np.cumsum(tensors["entry_counts"], dtype=np.int64).tolist()
        entries = [(ids[a:b], np.exp(log_probs[a:b])) for a, b in pairwise([0, *ends])]
        for start, stop in pairwise(tensors["starts"].tolist()):
            yield [entries.pop(0) for _ in range(stop - start + 1)]
        assert not entries


def test_rows_hold_what_score_has_written(taught: Path) -> None:
    folder = taught / "data"
    documents = [sample["document"] for sample in decoded_documents(str(folder))]
    numbers = {document.document_id: n for n, document in enumerate(documents)}
    stored = list(stored_positions(folder))
    student, teacher = byte_level(400), byte_level(480)
    entries = readable_entries(student, teacher)
    rows, batch = read(taught)
    to = (
        {teacher.eos_token_id, rows.rules.teacher.end_token_id} - {None},
        rows.rules.student.end_token_id,
    )
    seen, wanted = Counter(), Counter()

    def given(document, position):
        return stored[numbers[document.document_id]][position]

    for _, kind, found, expected in mapped_by_label(rows, batch, documents, given, entries, to):
        wanted[kind] += bool(expected)
        if found:
            assert found == pytest.approx(expected, rel=1e-4)
            seen[kind] += 1
    assert min(seen.values()) > 5, seen
    # In a segment of one token nothing confirms where it starts among the teacher's bytes.
    assert all(seen[kind] > 0.95 * wanted[kind] for kind in wanted), (seen, wanted)


def test_damage_takes_its_own_distributions_away(taught: Path, tmp_path: Path) -> None:
    root = shutil.copytree(taught, tmp_path / "world", ignore=shutil.ignore_patterns("plans"))
    dataset = open_dataset(root / "data")
    index = dataset.read_index(1)
    middle = int(index.payload_offset[2] + index.payload_bytes[2] // 2)
    flip(root / "data" / dataset.manifest.shards[1].file, middle)
    _, whole = read(taught)
    _, damaged = read(root, on_damage="quarantine")
    lost = damaged["loss_mask"] < whole["loss_mask"]
    assert int(damaged["num_quarantined_tokens"].sum()) > 0
    assert bool((whole["next_token_ids"][lost][:, 0] >= 0).any())
    for name, nothing in (("next_token_ids", -1), ("next_token_probs", 0), ("own_token_ids", -1)):
        place = lost if name == "own_token_ids" else lost[..., None]
        expected = torch.where(place, nothing, whole[name])
        assert torch.equal(damaged[name], expected)


def test_what_a_forced_cut_parts_has_no_distribution(tmp_path, monkeypatch) -> None:
    """Equal characters out of step, so that only spans say where a token is; then tokens in step.

    The bytes of both sides agree at any shift.
    """
    special, ten = [b""] * 4, b"x" * 10
    student, teacher = [*special, ten, b"x" * 5, b"a", b"aa"], [*special, ten, b"aa", b"a"]
    student_ids, teacher_ids = [5, *[4] * 299, 5, *[6] * 40], [*[4] * 300, *[5] * 20]
    sides = []
    for vocabulary, own in zip((student, teacher), (student_ids, teacher_ids), strict=True):
        bounds = np.cumsum([0, *(len(vocabulary[i]) for i in own)]).tolist()
        sides.append(Tokens(np.array(own), np.array(list(pairwise(bounds)))))
    spans = brute_force_spans(sides[0].byte_offsets, sides[1].byte_offsets)
    document = AlignedDocument("odd", "0" * 64, 3040, *sides, spans)
    dataset = write_dataset(tmp_path / "data", [document], shard_sizes=[1])
    losses = SeededLosses(len(teacher), top_k=3)
    monkeypatch.setattr(dataset_rows, "open_teachers", lambda *_, **__: losses)

    def tables(_, rules):
        conventions = {"student_convention": rules.student, "teacher_convention": rules.teacher}
        return VocabularyMap.of(
            ByteTokenizer(student), ByteTokenizer(teacher, TEACHER_EOS), **conventions
        )

    monkeypatch.setattr(next_tokens, "pair_tables", tables)
    given = {"seq_length": 64, "teacher_seq_length": 512, "stored_losses": "t"}
    rows = open_rows(dataset.folder, with_distributions=True, **given)
    plan = rows.datasets[0].plan
    batch = rows.__getitems__(range(len(rows)))
    assert plan.num_forced_segments > 3
    assert bool(np.any(plan.segments["flags"] & FORCED))
    own = mapped_by_label(
        rows,
        batch,
        [document],
        lambda _, position: losses.entries(0, position),
        (student, teacher),
        ({TEACHER_EOS}, STUDENT_EOS),
    )
    num_found = 0
    for token, _, found, expected in own:
        if found:
            assert found == pytest.approx(expected, rel=1e-4)
            assert token is None or token >= 301
            num_found += 1
    assert num_found >= 10
