"""Where new rows come from: each rule against what it says, on real tokenizers."""

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pipeline.alignment import align_batch
from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.tokenization import Tokenizer, load_tokenizer
from pipeline.transfer.command import main as transfer
from pipeline.transfer.origins import (
    COPIED,
    MEAN,
    SEEN,
    SEGMENTED,
    SPECIAL,
    Origins,
    TokenPairs,
    count_pairs,
    find_origins,
)
from pipeline.transfer.vocabulary_layers import (
    UntransferableError,
    transfer_rows,
    transfer_vocabulary,
)
from tests.pipeline.models.test_output_layer import GEMMA3N, make_model
from tests.support import tokenizer_zoo
from tests.support.datasets import byte_level, make_texts, with_control_tokens
from tests.support.hf_folders import make_llama, write_model
from tests.support.tokenizer_zoo import SHARED

NEW, OLD = byte_level(480), byte_level(400)
MARIAN = {"d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_attention_heads": 4}


def _batches() -> list[AlignedBatch]:
    documents = [SourceDocument(name, text.encode()) for name, text in make_texts(12)]
    return [align_batch(part, NEW, OLD) for part in (documents[:5], documents[5:])]


def _model(*, rows: int = OLD.vocab_size, **given: Any) -> LlamaForCausalLM:
    return make_llama(rows, num_hidden_layers=4, initializer_range=0.5, **given)


def _slow_rows(batches: list[AlignedBatch], rows: torch.Tensor) -> dict[int, np.ndarray]:
    """Mean over a token's occurrences of the mean over the bytes' owners, document by document."""
    seen: dict[int, list[np.ndarray]] = defaultdict(list)
    for batch in batches:
        for document in range(len(batch.documents)):
            own = slice(*batch.student.cu_tokens[document : document + 2])
            other = slice(*batch.teacher.cu_tokens[document : document + 2])
            old_ids = batch.teacher.input_ids[other].tolist()
            old_ranges = batch.teacher.byte_offsets[other].tolist()
            for new_id, (start, stop) in zip(
                batch.student.input_ids[own].tolist(),
                batch.student.byte_offsets[own].tolist(),
                strict=True,
            ):
                covering = [
                    rows[old_id].double().numpy()
                    for old_id, (a, b) in zip(old_ids, old_ranges, strict=True)
                    if a < stop and start < b
                ]
                seen[new_id].append(np.mean(covering, axis=0))
    return {token: np.mean(values, axis=0) for token, values in seen.items()}


def test_each_row_is_made_by_the_first_rule_that_applies() -> None:
    batches = _batches()
    origins = find_origins(NEW, OLD, count_pairs(batches))
    rows = _model().get_input_embeddings().weight.detach()
    found = transfer_rows(rows, origins, num_rows=NEW.vocab_size).double().numpy()
    slow, old = _slow_rows(batches, rows), {OLD.token_bytes(i): i for i in range(OLD.vocab_size)}
    met = set()
    for token, rule in enumerate(origins.rules.tolist()):
        content = NEW.token_bytes(token)
        met.add(rule)
        if rule == SPECIAL:
            assert token in NEW.named_tokens.values()
            continue
        if content in old:
            assert rule == COPIED
            expected = rows[old[content]].double().numpy()
        elif token in slow:
            assert rule == SEEN
            expected = slow[token]
        else:
            assert rule == SEGMENTED
            ids = OLD.tokenize_batch([content]).input_ids if _is_text(content) else list(content)
            own = [old[bytes([byte])] for byte in content] if not _is_text(content) else ids
            expected = rows[torch.tensor(np.array(own).astype(np.int64))].double().mean(0).numpy()
        np.testing.assert_allclose(found[token], expected, rtol=1e-5, atol=1e-6)
    assert {COPIED, SEGMENTED} <= met


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize(("new", "old"), [("llama2", "smollm2"), ("qwen2_5", "llama2")])
def test_real_vocabularies(new: str, old: str) -> None:
    """Shares sum to one, copied tokens spell the same, and segments spell their token."""
    if not (SHARED / new).exists():
        pytest.skip(f"needs {SHARED / new}")
    own, other = load_tokenizer(str(SHARED / new)), load_tokenizer(str(SHARED / old))
    origins = find_origins(own, other, TokenPairs())
    totals = np.bincount(origins.new_ids, origins.shares, own.vocab_size)
    np.testing.assert_allclose(totals, origins.rules != MEAN)
    counts = origins.counts()
    assert counts["mean"] < 0.01 * own.vocab_size
    assert counts["copied"] > 0.1 * own.vocab_size
    _require_spelled(origins, own, other)
    assert origins.rules[own.eos_token_id or 0] == SPECIAL


def _require_spelled(origins: Origins, new: Tokenizer, old: Tokenizer) -> None:
    by_token: dict[int, list[int]] = defaultdict(list)
    for token, source in zip(origins.new_ids.tolist(), origins.old_ids.tolist(), strict=True):
        by_token[token].append(source)
    for token, sources in by_token.items():
        if origins.rules[token] in (COPIED, SEGMENTED):
            spelled = b"".join(map(old.token_bytes, sources))
            content = new.token_bytes(token)
            # Bytes that the old vocabulary lacks leave no trace.
            assert spelled == content or (len(spelled) < len(content) and len(content) > 1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_gets_another_vocabulary_and_can_be_saved(tmp_path: Path, tied: bool) -> None:
    model = _model(rows=OLD.vocab_size + 7, tie_word_embeddings=tied)  # padded, as many are
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight.data[OLD.vocab_size :] = float("nan")  # of no token, and of no use
    start = copy.deepcopy(model)
    origins = find_origins(NEW, OLD, count_pairs(_batches()))
    transfer_vocabulary(model, origins, num_rows=512)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, new = getattr(start, name)().weight, getattr(model, name)().weight
        assert new.shape == (512, 16)
        torch.testing.assert_close(new, transfer_rows(old, origins, num_rows=512))
        torch.testing.assert_close(new[-1], old[: OLD.vocab_size].mean(0))
        assert new.isfinite().all()
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.vocab_size == 512
    torch.testing.assert_close(
        again.get_output_embeddings().weight, model.get_output_embeddings().weight
    )


def test_a_model_of_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each byte has the row of the old token that spells it; transformers encode to bytes."""
    old, new = write_model(tmp_path / "old", OLD), tmp_path / "new"
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(text for _, text in make_texts(9)), "utf-8")
    given = [str(old), "--tokenizer", "bytes", "--text", str(texts), "--output", str(new)]
    assert transfer(given) == 0
    assert capsys.readouterr().out.split("copied")[1].split()[0] == "256"
    rows = [
        AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()
        for folder in (old, new)
    ]
    place = {OLD.token_bytes(token): token for token in range(OLD.vocab_size)}
    sources = [place[bytes([byte])] for byte in range(256)] + [OLD.eos_token_id] * 2
    torch.testing.assert_close(rows[1], rows[0][sources])
    text = "".join(text for _, text in make_texts(20, seed=1)) + "\x00\x7f \U0010ffff"
    exported = AutoTokenizer.from_pretrained(new)
    assert exported(text)["input_ids"] == list(text.encode())
    assert exported.decode(list(text.encode())) == text
    assert (exported.eos_token_id, exported.pad_token_id) == (256, 257)
    assert load_tokenizer(str(new)).sha256 == load_tokenizer("bytes").sha256


def test_an_output_layers_bias_comes_along() -> None:
    model = _model(tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(16, OLD.vocab_size)
    bias = model.lm_head.bias.detach().clone()
    origins = find_origins(NEW, OLD, count_pairs(_batches()))
    transfer_vocabulary(model, origins)
    torch.testing.assert_close(
        model.lm_head.bias.detach(), transfer_rows(bias, origins, num_rows=NEW.vocab_size)
    )


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="old token 5000 exceeds the old vocabulary's 400"):
        find_origins(NEW, OLD, TokenPairs(np.array([2]), np.array([5000]), np.array([1.0])))
    pairs = TokenPairs(np.array([2]), np.array([398]), np.array([1.0]))
    with pytest.raises(ValueError, match="old token 398 exceeds the old vocabulary's 390"):
        find_origins(NEW, OLD, pairs, num_rows=390)
    model = _model()
    model.register_buffer("per_token", torch.zeros(OLD.vocab_size))
    origins = find_origins(NEW, OLD, TokenPairs())
    with pytest.raises(UntransferableError, match="per_token"):
        transfer_vocabulary(model, origins)


@pytest.mark.parametrize(
    ("family", "given", "named"),
    [
        ("gemma3n_text", GEMMA3N, "rows for tokens also in model.embed_tokens_per_layer.weight"),
        ("roberta", {"is_decoder": True}, "position_embeddings from its padding's id, 0, which"),
        ("xglm", {"d_model": 32, "attention_heads": 4, "num_layers": 1}, "embed_positions from"),
    ],
)
def test_models_in_which_more_depends_on_tokens_are_refused(
    family: str, given: dict[str, Any], named: str
) -> None:
    """Gemma 3n's embeddings for each layer have fewer rows than its tokens."""
    model = make_model(family, **{**given, "vocab_size": 400, "vocab_size_per_layer_input": 390})
    origins = find_origins(NEW, OLD, TokenPairs())
    with pytest.raises(UntransferableError, match=named):
        transfer_vocabulary(model, origins)


@pytest.mark.parametrize(
    ("family", "given", "rows"),
    [
        ("marian", MARIAN, "400 embeddings and 400 rows of output for a vocab_size of 800"),
        ("moshi", {"audio_encoder_config": None}, "803 embeddings and 802 rows of output for"),
    ],
)
def test_rows_that_a_configuration_counts_otherwise_are_refused(
    family: str, given: dict[str, Any], rows: str
) -> None:
    """Only loading what was written failed."""
    model = make_model(family, **{**given, "vocab_size": 400})
    with pytest.raises(UntransferableError, match=rows):
        transfer_vocabulary(model, find_origins(NEW, OLD, TokenPairs()))


def test_an_output_layer_that_learns_more_of_each_token_is_refused() -> None:
    """Dory's learns a scale, which would stay that of another token."""
    model = _model()
    model.lm_head.logit_scale = torch.nn.Parameter(torch.ones(OLD.vocab_size))
    with pytest.raises(UntransferableError, match=r"rows for tokens also in lm_head\.logit_scale"):
        transfer_vocabulary(model, find_origins(NEW, OLD, TokenPairs()))


def test_a_control_token_has_the_row_of_its_name_before_that_of_its_role() -> None:
    """The new vocabulary's end is `<|endoftext|>`; the old one has that, and ends with `</s>`."""
    new, old = tokenizer_zoo.load("qwen_like"), with_control_tokens(OLD, "<|endoftext|>")
    assert old.eos_token_id == old.find_token("</s>")
    for known, name in ((old, "<|endoftext|>"), (OLD, "</s>")):
        origins = find_origins(new, known, TokenPairs())
        made_of = origins.old_ids[origins.new_ids == new.eos_token_id]
        assert made_of.tolist() == [known.find_token(name)]


def test_padding_has_the_row_of_padding() -> None:
    """GPT-NeoX's `<|padding|>`, whose role its tokenizer's file doesn't name."""
    new, old = with_control_tokens(NEW, "<|padding|>"), with_control_tokens(OLD, "<pad>")
    origins = find_origins(new, old, TokenPairs())
    token = new.find_token("<|padding|>")
    assert origins.old_ids[origins.new_ids == token].tolist() == [old.find_token("<pad>")]


def test_a_model_may_have_fewer_rows_than_tokens() -> None:
    """As Gemma 3 1B: one more named token, which has no row on either side."""
    more = with_control_tokens(OLD, "<image>")
    into = find_origins(with_control_tokens(NEW, "<image>"), more, TokenPairs(), num_rows=400)
    assert into.old_ids.max() < 400
    rows = transfer_rows(_model().get_input_embeddings().weight, into, num_rows=NEW.vocab_size)
    alone = find_origins(NEW, OLD, TokenPairs())
    torch.testing.assert_close(
        rows, transfer_rows(_model().get_input_embeddings().weight, alone, num_rows=NEW.vocab_size)
    )
