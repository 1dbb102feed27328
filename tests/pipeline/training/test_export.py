"""A trained student's folder, where its tokenizer can't be made for transformers."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import GenerationConfig

from pipeline.dataset.files import open_dataset
from pipeline.models.exported_tokenizer import ExportedTokenizer
from pipeline.tokenization import TokenizerError
from pipeline.training import export
from tests.support.datasets import build_dataset
from tests.support.hf_folders import make_llama


def test_generation_defaults_stay_without_a_tokenizer_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature without do_sample is one that transformers reads and refuses to save."""

    def refuse(*_: object, **__: object) -> None:
        raise TokenizerError("other ids")

    build_dataset(tmp_path / "data")
    dataset = open_dataset(tmp_path / "data")
    student = make_llama(400)
    student.generation_config = GenerationConfig(temperature=0.6, eos_token_id=[1, 3])
    monkeypatch.setattr(export, "export_tokenizer", refuse)
    rows = cast(Any, SimpleNamespace(dataset=dataset, manifest=dataset.manifest))
    made = export.prove_tokenizer(rows, student)
    export.export_model(student, made, tmp_path / "model")
    kept = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert (kept["temperature"], kept["eos_token_id"]) == (0.6, [1, 3])
    assert (tmp_path / "model" / Path(dataset.manifest.student.file).name).is_file()


def test_whoever_may_read_a_model_s_configuration_may_read_its_weights(tmp_path: Path) -> None:
    """safetensors 0.8 keeps them for their owner."""
    before = os.umask(0o027)
    try:
        export.export_model(make_llama(400), ExportedTokenizer({}), tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == 0o640


def test_a_multimodal_model_s_text_part_names_the_tokens_too(tmp_path: Path) -> None:
    """Its embeddings know the padding by that, and an old id may have no row any more."""
    text = {"vocab_size": 300, "eos_token_id": 1, "pad_token_id": 409}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    ends = {"bos_token_id": None, "eos_token_id": [4, 7], "pad_token_id": 4}
    ExportedTokenizer({}, token_ids=ends).write(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found == {**ends, "text_config": {**text, **ends}}
