"""Hybrid students, whose state runs through a row, learn from rows of one document each."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config

from pipeline.packing.rules import PackingRules
from pipeline.streaming import AlignedRows, StreamConfig
from pipeline.training.command import main
from tests.support.datasets import byte_level
from tests.support.runs import read_log
from tests.support.streaming_data import around

OPTION = "--one-document-a-row"


def write_hybrid(folder: Path) -> Path:
    """Write a model with a convolution over the tokens, of which attention knows nothing."""
    torch.manual_seed(3)
    vocabulary = byte_level(400)
    config = Lfm2Config(
        vocab_size=vocabulary.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        layer_types=["conv", "full_attention"],
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / vocabulary.file_name).write_bytes(vocabulary.file_bytes)
    return folder


def arguments(world: Path, student: Path, output: Path) -> list[str]:
    sizes = ["--seq-length", "64", "--global-batch-size", "3", "--micro-batch-size", "3"]
    steps = ["--num-steps", "1", "--warmup-steps", "0", "--device", "cpu", "--method", "full"]
    places = ["--data", str(world / "data"), "--student", str(student), "--output", str(output)]
    return [*places, *sizes, *steps]


def test_a_hybrid_learns_what_its_own_losses_of_each_document_say(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student, output = write_hybrid(tmp_path / "student"), tmp_path / "run"
    given = arguments(copied, student, output)
    assert main(given) == 2
    refused = capsys.readouterr().err
    assert "Lfm2ForCausalLM (lfm2) can't be run on packed rows" in refused
    assert refused.endswith(f"hint: {OPTION}\n")
    held = ["--heldout", str(copied / "data")]
    assert main([*given, OPTION, *held]) == 0
    (step,) = read_log(output)
    rows = AlignedRows(
        StreamConfig(
            str(copied / "data"), seq_length=64, global_batch_size=3, one_document_a_row=True
        )
    )
    model, losses = AutoModelForCausalLM.from_pretrained(student), []
    for row in (rows[number] for number in range(3)):
        _, length, end = row["cu_seqlens"][:3].tolist()
        assert (end, int(row["loss_mask"][length:].sum())) == (64, 0), "one document, and padding"
        ids, labels = row["input_ids"][None, :length].long(), row["labels"][:length].long()
        counted = row["loss_mask"][:length].bool()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none")[counted])
    assert step["loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-4)


def test_a_run_without_it_goes_on_with_its_rows_only(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(copied, copied / "student", tmp_path / "run")
    assert main([*given, "--exit-after", "1"]) == 0
    capsys.readouterr()
    assert main([*given, OPTION]) == 2
    assert "--one-document-a-row False, this run has True" in capsys.readouterr().err


def test_rules_of_before_keep_their_fingerprint() -> None:
    """Runs and plans that began before there was this choice continue."""
    rules = PackingRules(64, 128, around(1, 1, 2), around(0, 0, None))
    before = "7bf30925028531f99729ed9b6be05dc936478019df3a6f6474fd28b5338c5fcb"
    assert rules.fingerprint == before
    assert replace(rules, one_document_a_row=True).fingerprint != before


def test_an_untrained_teacher_runs_if_it_is_allowed(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*arguments(copied, copied / "student", tmp_path / "run")[:-1], "teacher"]
    given += ["--teacher", str(copied / "teacher")]
    assert main(given) == 2
    assert "hint: --allow-untrained-teacher  # only to test" in capsys.readouterr().err
    assert main([*given, "--allow-untrained-teacher"]) == 0
