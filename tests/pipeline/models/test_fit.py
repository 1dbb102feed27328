"""Has a model a row for every token of the data? What counts is what documents and rows hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from pipeline.dataset.files import Dataset, open_dataset
from pipeline.models import fit
from pipeline.models.running_teacher import require_model_room
from pipeline.packing.opening import open_run
from pipeline.packing.reading import Reading
from pipeline.packing.rules import PackingRules
from schemas.manifest import ConventionRecord
from tests.support.datasets import build_dataset, byte_level, with_control_tokens
from tests.support.streaming_data import around


def _dataset(folder: Path, text: str, *, special: bool) -> Dataset:
    named = with_control_tokens(byte_level(400), "<image>", special=special)
    build_dataset(folder, [("one", text)], student=named, num_shards=1)
    return open_dataset(str(folder))


def _require(dataset: Dataset, record: Any = None, vocab_size: int = 400) -> None:
    opened = open_run(Reading(dataset.location))
    if record is not None:
        opened = replace(opened, manifest=replace(opened.manifest, student=record))
    fit.require_room(
        opened,
        "models/student",
        side="student",
        vocab_size=vocab_size,
        seq_length=64,
        max_length=512,
        remedy="lower --seq-length",
    )


def test_a_control_token_beyond_the_rows_is_in_no_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever texts spell, so that none is read."""
    dataset = _dataset(tmp_path, "An <image> here.", special=True)
    monkeypatch.setattr(fit, "decode_document", lambda _: pytest.fail("reads the data"))
    _require(dataset)
    own = ConventionRecord(first_token_id=0, continued_token_id=0, end_token_id=400)
    with pytest.raises(ValueError, match=r"holds student token 400 around texts .* 0 … 399"):
        _require(dataset, replace(dataset.manifest.student, convention=own))


def test_a_word_beyond_the_rows_is_looked_for(tmp_path: Path) -> None:
    _require(_dataset(tmp_path / "without", "No picture here.", special=False))
    dataset = _dataset(tmp_path / "with", "An <image> here.", special=False)
    with pytest.raises(ValueError, match=r'token 400 in document "one" .* models/student has rows'):
        _require(dataset)
    _require(dataset, vocab_size=401)


@pytest.mark.parametrize(("seq_length", "fits"), [(64, True), (65, False)])
def test_rows_in_which_one_document_changes_the_others_rotation_are_refused(
    tmp_path: Path, seq_length: int, fits: bool
) -> None:
    """As of Phi-3's 128k: a document beyond the first 4096 positions turns all of a step."""
    rotation = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
    }
    small = {"vocab_size": 400, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = Phi3Config(
        **small, num_key_value_heads=4, pad_token_id=0, rope_parameters=rotation,
        max_position_embeddings=512, original_max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    opened = open_run(Reading(_dataset(tmp_path, "A text.", special=True).location))
    rules = PackingRules(seq_length, seq_length, around(), around())
    if fits:
        require_model_room(model, opened, rules, "phi", side="student")
    else:
        with pytest.raises(ValueError, match=r"than 64 \(longrope\).*: lower seq_length to 64"):
            require_model_room(model, opened, rules, "phi", side="student")
    rotation = model.config.rope_parameters
    model.config.rope_parameters = {"full_attention": rotation, "sliding_attention": None}
    assert fit.short_length(model.config) == 64
    assert fit.short_length(LlamaConfig()) is None
