"""The code length of whole texts: one convention for `vocag evaluate` and for held-out sets."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

import tokenizers
import torch
from tokenizers.processors import TemplateProcessing

from pipeline.evaluation.command import main
from pipeline.evaluation.likelihood import text_to_score
from pipeline.evaluation.results import read_results
from pipeline.evaluation.set_files import read_items
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.packing.reading import Reading
from pipeline.streaming import AlignedRows
from pipeline.tokenization import Tokenizer, load_tokenizer
from pipeline.training.config import TrainConfig
from pipeline.training.held_out import evaluate, open_heldout
from pipeline.training.ranks import Ranks
from tests.support.datasets import build_dataset, byte_level
from tests.support.hf_folders import write_model

TINY = str(Path(__file__).parents[2] / "data" / "evaluation")


def tokenizer(folder: Path, *, adds_bos: bool) -> Tokenizer:
    """One that puts <s> before a text itself, or leaves that to whoever asks it."""
    own = tokenizers.Tokenizer.from_str(byte_level(300).file_bytes.decode())
    if adds_bos:
        own.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    own.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_costs_what_it_costs_as_a_held_out_document(adds_bos: bool, tmp_path: Path) -> None:
    """A tokenizer that adds BOS was charged for it: - log P(BOS | BOS) of each item."""
    own = tokenizer(tmp_path, adds_bos=adds_bos)
    student = write_model(tmp_path / "one", own)
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (student / "tokenizer_config.json").write_text(json.dumps(ends))
    command = [str(student), "--data", TINY, "--output", str(tmp_path), "--device", "cpu"]
    assert main([*command, "--tasks", "svamp", "--measures", "text"]) == 0
    found = read_results(tmp_path / "one").measurements["svamp"]["text"].values["bits_per_byte"]

    items = read_items("svamp", TINY)
    texts = [(str(place), text_to_score(item, "text")) for place, item in enumerate(items)]
    build_dataset(tmp_path / "heldout", texts, student=own)
    config = TrainConfig(
        data=Reading(str(tmp_path / "heldout")),
        student=str(student),
        output=tmp_path / "run",
        method=Method("full"),
        num_steps=1,
        warmup_steps=0,
        seq_length=512,
        global_batch_size=1,
        micro_batch_size=1,
        heldout=(str(tmp_path / "heldout"),),
    )
    training = AlignedRows(config.stream)
    convention = training.rules.student
    assert (convention.first_token_id, convention.end_token_id) == (0, 1)
    model, heldout = load_language_model(str(student)), open_heldout(config, training)
    measured = evaluate(config, model, heldout, Ranks(torch.device("cpu")))
    assert found.value == pytest.approx(measured["heldout_bits_per_byte"], rel=1e-5)
