"""A text's code length against losses that are summed by hand, read whole and in parts."""

import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForCausalLM

from pipeline.models.hf_models import load_language_model
from pipeline.transfer.measure import bits_per_byte, code_lengths, context_of, num_positions
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model

TEXTS = [b"He pays 12 dollars for 3 pens.", b"It is raining. " * 9, "Å\u2028 é".encode()]
CONTEXT = 7


@pytest.mark.parametrize("seq_length", [None, 1, 5, 400])
@torch.inference_mode()
def test_every_token_is_predicted_once_after_the_context(
    seq_length: int | None, tmp_path: Path
) -> None:
    tokenizer = byte_level(400)
    model = load_language_model(str(write_model(tmp_path / "model", tokenizer)))
    expected = []
    for text in TEXTS:
        ids = tokenizer.tokenize_batch([text]).input_ids.tolist()
        nats = 0.0
        for place, token in enumerate(ids):
            start = place - place % (seq_length or len(ids))
            inputs = torch.tensor([[CONTEXT, *ids[start:place]]])
            nats += float(cross_entropy(model(input_ids=inputs).logits[0, -1], torch.tensor(token)))
        expected.append(nats)
    found = code_lengths(model, tokenizer, TEXTS, context=CONTEXT, seq_length=seq_length)
    assert found == pytest.approx(expected, rel=1e-4)
    if seq_length is None:
        whole = sum(code_lengths(model, tokenizer, TEXTS, context=context_of(tokenizer)))
        expected_bits = whole / math.log(2) / sum(map(len, TEXTS))
        assert bits_per_byte(model, tokenizer, TEXTS) == pytest.approx(expected_bits)


def test_texts_that_say_nothing_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_level(400)
    model = load_language_model(str(write_model(tmp_path / "model", tokenizer)))
    with pytest.raises(ValueError, match="no text to measure on"):
        bits_per_byte(model, tokenizer, [b""])
    with pytest.raises(ValueError, match=r"text 1 can't be tokenized"):
        code_lengths(model, tokenizer, [b"good", b"\xff"], context=CONTEXT)
    with pytest.raises(ValueError, match=r"token 400 exceeds the model's 400 rows: give it"):
        code_lengths(model, tokenizer, [b"good"], context=400)


def test_a_text_longer_than_the_model_s_positions_is_read_in_parts() -> None:
    """GPT-2 learns an embedding for each position: there is none for a later one."""
    tokenizer = byte_level(400)
    config = GPT2Config(vocab_size=400, n_embd=8, n_layer=1, n_head=1, n_positions=16)
    model = GPT2LMHeadModel(config).eval()
    found = bits_per_byte(model, tokenizer, TEXTS)
    read = {"context": context_of(tokenizer), "seq_length": 15}
    nats = sum(code_lengths(model, tokenizer, TEXTS, **read))
    assert found == pytest.approx(nats / math.log(2) / sum(map(len, TEXTS)))


def test_positions_that_begin_behind_the_padding_are_fewer() -> None:
    """RoBERTa's first position has the padding's id + 1."""
    tokenizer = byte_level(400)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = RobertaConfig(
        vocab_size=400, max_position_embeddings=18, num_attention_heads=1, is_decoder=True,
        pad_token_id=1, **sizes,
    )  # fmt: skip
    model = RobertaForCausalLM(config).eval()
    assert num_positions(model) == 16
    assert bits_per_byte(model, tokenizer, TEXTS) > 0
