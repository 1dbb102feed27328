"""The README's picture: its losses are the teacher's, on the tokens that it shows."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

PICTURE = Path(__file__).parents[2] / "docs/figures/headline.svg"


@pytest.mark.slow
def test_the_picture_has_the_teachers_losses(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2).float()
    ids = tokenizer("<|endoftext|>Probability, Uncertainty", return_tensors="pt").input_ids
    with torch.no_grad():
        losses = cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none").tolist()
    shown = re.findall(r'class="loss"[^>]*>([\d.]+)<', PICTURE.read_text("utf-8"))
    teacher, student = shown[: len(losses)], shown[len(losses) :]
    assert [float(words) for words in teacher] == pytest.approx(losses, abs=0.5, rel=0.05)
    # Pro and b are in Prob; c, ertain and ty in certainty.
    assert student == [teacher[place] for place in (0, 0, 1, 2, 3, 4, 4, 4)]
