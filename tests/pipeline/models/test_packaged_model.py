"""The demos' teacher: real weights from a package's GGUF file, with the tokenizer next to them."""

import random
from pathlib import Path

import pytest
import torch

from pipeline.losses.cross_entropy import score_tokens
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.tokenization import load_tokenizer

TEXT = (
    "The sun rises in the east and sets in the west. In the morning, people drink coffee and read "
    "the newspaper before they go to work, and in the evening they come home and have dinner."
)


@pytest.mark.slow
def test_packaged_teacher_knows_english(smollm2: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2))
    model = load_language_model(str(smollm2))
    words = TEXT.split()
    random.Random(0).shuffle(words)
    in_order, shuffled = (
        mean_loss(model, tokenizer.tokenize_batch([text.encode()]).input_ids.tolist())
        for text in (TEXT, " ".join(words))
    )
    # Chance is ln(49,152) = 10.8 nats.
    assert in_order < 3
    assert shuffled > in_order + 2


@torch.inference_mode()
def mean_loss(model: torch.nn.Module, ids: list[int]) -> float:
    input_ids = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    hidden = hidden_states(model, input_ids, position_ids=positions)
    losses = score_tokens(hidden, output_layer(model), input_ids, teacher_loss_mask=positions > 0)
    return float(losses.nanmean())
