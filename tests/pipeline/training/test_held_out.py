"""Held-out sets: bits per byte against a slow count, and which sets are taken."""

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pipeline.command_line.failures import hints_of
from pipeline.dataset.files import open_dataset
from pipeline.methods.hf_pass import student_states
from pipeline.methods.method import Method
from pipeline.streaming import AlignedRows, Reading, Rows, StreamConfig
from pipeline.tokenization import load_tokenizer
from pipeline.training import held_out
from pipeline.training.held_out import evaluate, open_heldout
from pipeline.training.ranks import Ranks
from schemas.errors import ForeignTokenizerError
from schemas.manifest import MANIFEST_FILE, ConventionRecord, encode_manifest
from tests.support.datasets import (
    build_dataset,
    byte_level,
    make_texts,
    read_documents,
    remove_documents,
)
from tests.support.training_runs import pair_config, token_losses


def test_bits_per_byte_equal_a_slow_count(
    lab: Path, tmp_path: Path, student: PreTrainedModel
) -> None:
    """Of the text alone: neither what comes before a document nor its end is charged."""
    heldout = str(lab / "heldout")
    config = pair_config(lab, tmp_path, Method("full"), seq_length=512, heldout=(heldout,))
    rows = AlignedRows(StreamConfig(Reading(heldout, student_eos="none"), seq_length=512))
    documents = list(read_documents(lab / "heldout").values())
    nats = sum(sum(token_losses(student, document, "student", rows)) for document in documents)
    num_bytes = sum(document.num_text_bytes for document in documents)
    # Whole documents in a row, as the slow count has them.
    training = AlignedRows(config.stream)
    assert training.rules.student.end_token_id is not None
    sets = open_heldout(config.heldout_sets, training)
    measured = evaluate(config, student, sets, Ranks(torch.device("cpu")))
    assert measured["heldout_bits_per_byte"] == pytest.approx(
        nats / math.log(2) / num_bytes, rel=1e-4
    )


def test_long_held_out_rows_take_no_more_memory_than_training(
    lab: Path, tmp_path: Path, student: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was eight at once: of 32,768 tokens they take twice what `--dry-run` had counted."""
    sizes: list[int] = []

    def counted(model: PreTrainedModel, batch: Rows) -> torch.Tensor:
        sizes.append(len(batch["input_ids"]))
        return student_states(model, batch)

    monkeypatch.setattr(held_out, "student_states", counted)
    sets = (str(lab / "heldout"),)
    rules: dict[str, Any] = {"one_document_a_row": True, "global_batch_size": 4, "heldout": sets}
    found = {}
    for length, micro_batch_size in ((64, 1), (8192, 1), (8192, 4)):
        lengths = {"seq_length": length, "micro_batch_size": micro_batch_size}
        config = pair_config(lab, tmp_path, Method("full"), **lengths, **rules)
        heldout = open_heldout(config.heldout_sets, AlignedRows(config.stream))
        sizes.clear()
        (bits,) = evaluate(config, student, heldout, Ranks(torch.device("cpu"))).values()
        found[length, micro_batch_size] = max(sizes), bits
    assert [rows for rows, _ in found.values()] == [8, 2, 4]
    assert found[8192, 1][1] == pytest.approx(found[8192, 4][1], rel=1e-5)


def test_held_out_sets_are_measured_by_name(
    lab: Path, tmp_path: Path, student: PreTrainedModel
) -> None:
    """Whatever was recorded when a set was aligned: the student knows no other tokens."""
    manifest = build_dataset(tmp_path / "other", make_texts(6, seed=1))
    other = replace(manifest.student, convention=ConventionRecord(5, 5, None))
    changed = encode_manifest(replace(manifest, student=other))
    (tmp_path / "other" / MANIFEST_FILE).write_bytes(changed)

    def measured(*sets: str) -> dict[str, float]:
        config = pair_config(lab, tmp_path, Method("full"), heldout=sets)
        heldout = open_heldout(config.heldout_sets, AlignedRows(config.stream))
        return evaluate(config, student, heldout, Ranks(torch.device("cpu")))

    found = measured(f"first={lab / 'heldout'}", str(tmp_path / "other"), str(lab / "pair"))
    own = found["heldout_bits_per_byte/first"]
    assert list(found) == [f"heldout_bits_per_byte/{name}" for name in ("first", "other", "pair")]
    assert own == found["heldout_bits_per_byte/other"] != found["heldout_bits_per_byte/pair"]
    assert measured(f"first={lab / 'heldout'}") == {"heldout_bits_per_byte": own}
    with pytest.raises(ValueError, match="have one name: write NAME=DATASET"):
        measured(str(lab / "pair"), "x/pair")
    url = "s3://bucket/lang=en/heldout"
    named = pair_config(lab, tmp_path, Method("full"), heldout=(url, f"own={url}")).heldout_sets
    assert named == {"heldout": url, "own": url}


def test_a_set_without_the_students_tokens_is_refused(lab: Path, tmp_path: Path) -> None:
    build_dataset(tmp_path / "heldout", make_texts(6, seed=1), student=byte_level(440))
    config = pair_config(lab, tmp_path, Method("full"), heldout=(str(tmp_path / "heldout"),))
    with pytest.raises(ForeignTokenizerError, match="align the held-out texts") as refused:
        open_heldout(config.heldout_sets, AlignedRows(config.stream))
    [hint] = hints_of(refused.value)
    _, *words, source, _, output = shlex.split(hint)
    assert words == ["vocag", "align", "--input", f"{tmp_path / 'heldout'}", "--student"]
    record = open_dataset(str(lab / "pair")).manifest.student
    assert load_tokenizer(source).sha256 == record.sha256
    assert output == f"{tmp_path / 'heldout'}-2"


def test_removed_documents_count_on_neither_side(
    lab: Path, tmp_path: Path, student: PreTrainedModel
) -> None:
    """Their bytes were counted: a student looked better than it was."""
    pytest.importorskip("apache_beam")
    texts = make_texts(6, seed=1)
    build_dataset(tmp_path / "all", texts)
    build_dataset(tmp_path / "rest", texts[2:])
    remove_documents(tmp_path / "all", *(name for name, _ in texts[:2]))
    sets = (str(tmp_path / "all"), str(tmp_path / "rest"))
    config = pair_config(lab, tmp_path, Method("full"), seq_length=512, heldout=sets)
    heldout = open_heldout(config.heldout_sets, AlignedRows(config.stream))
    found, wanted = evaluate(config, student, heldout, Ranks(torch.device("cpu"))).values()
    assert found == pytest.approx(wanted, rel=1e-5)
