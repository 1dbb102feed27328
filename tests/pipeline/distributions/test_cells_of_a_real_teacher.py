"""A real teacher's mass in cells, by groups of tokens, and what a small student makes of it."""

import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from pipeline.guidance.cells import Cells
from pipeline.guidance.cross_entropy import linear_cross_entropy
from pipeline.guidance.distributions import LabelDistributions, distilled_loss
from pipeline.methods.label_distributions import ask_distributions
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.streaming.vocabularies import vocabulary_map
from pipeline.tokenization import load_tokenizer
from schemas.distribution_rule import EntryShape
from tests.pipeline.distributions.test_cells import SHARED, real_texts
from tests.support.datasets import build_dataset

GROUPS = {
    "numbers": rb" ?[0-9]{2,}",
    "one digit": rb" ?[0-9]",
    "lone space": rb" ",
    "line breaks": rb"[ ]*\n+",
    "indents": rb"[ ]{2,}",
    "words": rb" ?[A-Za-z]{2,}",
}


@dataclass(frozen=True)
class Read:
    """What a real teacher says of some rows: all places of them, and the student's four tokens."""

    entries: list[bytes]
    known: LabelDistributions
    labels: torch.Tensor
    context: torch.Tensor


@cache
def read_by_smollm2(name, smollm2, folder):
    """Let SmolLM2 read real texts, with the labels of a student's tokenizer; a minute or two."""
    student, teacher = load_tokenizer(str(SHARED / name)), load_tokenizer(str(smollm2))
    texts = [(f"d{number}", text[:3000]) for number, text in enumerate(real_texts()[:220])]
    build_dataset(folder / name, texts, student=student, teacher=teacher)
    rows = AlignedRows(StreamConfig(Reading(str(folder / name)), seq_length=512))
    tables, model = vocabulary_map(rows), load_language_model(str(smollm2))
    shape, parts = EntryShape(17, 4), []
    for position in range(0, len(rows), max(1, len(rows) // 26)):
        batch = rows.__getitems__([position])
        with torch.no_grad():
            places = batch["teacher_position_ids"]
            states = hidden_states(model, batch["teacher_input_ids"], position_ids=places)
            found = ask_distributions(states, output_layer(model), batch, tables, shape)
        ids, labels = batch["input_ids"][0].long(), batch["labels"][0].long()
        window = torch.nn.functional.pad(ids, (3, 0)).unfold(0, 4, 1)
        kept = batch["loss_mask"][0] > 0
        parts.append([each[kept] for each in (found.ids[0], found.probs[0], found.own_ids[0],
                                              labels, window)])  # fmt: skip
    ids, probs, own_ids, labels, context = map(torch.cat, zip(*parts, strict=True))
    known = LabelDistributions(ids, probs, own_ids, shape, Cells.of(tables.cells))
    entries = [student.token_bytes(token) for token in range(len(tables.cells))]
    return Read(entries, known, labels, context)


def of_group(entries, group):
    """Return which tokens are of a group, bool [V]."""
    return torch.tensor([re.fullmatch(GROUPS[group], entry) is not None for entry in entries])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("read")


real = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/tokenizers")


@real
@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_neox", "llama2"])
def test_a_real_teacher_expects_what_the_student_s_tokenizer_writes(name, smollm2, folder):
    """Its mass on cells, divided within each as the text does, is that of the labels' groups."""
    read = read_by_smollm2(name, smollm2, folder)
    known, taught = read.known, read.known.can_teach(read.labels)
    numbers = known.cells.numbers
    mass = torch.zeros(len(numbers), dtype=torch.float64)
    ids, probs = known.ids[taught], known.probs[taught].double()
    mass.index_add_(0, known.numbers_of(ids)[ids >= 0], probs[ids >= 0])
    seen = torch.bincount(read.labels[taught], minlength=len(numbers)).double()
    of_cell = torch.zeros_like(seen).index_add_(0, numbers, seen)
    # A cell's mass goes to its tokens as often as they occur; one that none does has none.
    expected = mass[numbers] * seen / of_cell[numbers].clamp_min(1)
    ratios = {}
    for group in GROUPS:
        chosen = of_group(read.entries, group)
        if (count := float(seen[chosen].sum())) >= 200:
            ratios[group] = float(expected[chosen].sum()) / count
    print(name, ratios)
    assert len(ratios) >= 3
    assert seen.sum() > 10_000
    assert all(abs(ratio - 1) < 0.05 for ratio in ratios.values()), ratios


def learn(read, learned, arm, seed):
    """Train a small student on three quarters of the labels; return what it expects of the rest.

    Bits a label, and at packed numbers; and of these the mass on packed numbers and a lone space.
    """
    torch.manual_seed(seed)
    size, width = len(read.entries), 32
    embedding = torch.nn.Embedding(size, width)
    body = torch.nn.Sequential(torch.nn.Linear(4 * width, 64), torch.nn.GELU())
    head = torch.nn.Parameter(torch.randn(size, 64) * 0.02)
    parameters = [*embedding.parameters(), *body.parameters(), head]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.1)
    is_held_out = torch.arange(len(read.labels)) // 128 % 4 == 0
    train = (~is_held_out).nonzero()[:, 0]
    for _ in range(300):
        some = train[torch.randint(len(train), (128,))]
        labels = read.labels[some][None]
        own = (each[some][None] for each in (learned.ids, learned.probs, learned.own_ids))
        known = LabelDistributions(*own, learned.shape, learned.cells)
        scores = linear_cross_entropy(
            body(embedding(read.context[some]).flatten(1))[None],
            head,
            labels,
            entry_ids=known.asked_of(labels),
            cells=known.cells,
        )
        weight = 0.0 if arm == "plain" else 0.8
        result = distilled_loss(
            scores, known, labels, loss_mask=torch.ones(labels.shape), weight=weight
        )
        optimizer.zero_grad()
        (result.loss_sum / len(some)).backward()
        optimizer.step()
    with torch.no_grad():
        states = body(embedding(read.context[is_held_out]).flatten(1))
        log_q = (states @ head.T).log_softmax(-1)
    labels = read.labels[is_held_out]
    bits = -log_q.gather(1, labels[:, None])[:, 0] / np.log(2)
    packed, lone = of_group(read.entries, "numbers"), of_group(read.entries, "lone space")
    at_numbers = packed[labels]
    q = log_q[at_numbers].exp()
    found = (
        bits.mean(),
        bits[at_numbers].mean(),
        q[:, packed].sum(1).mean(),
        q[:, lone].sum(1).mean(),
    )
    return [float(each) for each in found]


@real
@pytest.mark.long
def test_a_small_student_that_packs_numbers_learns_them(smollm2, folder):
    """By prefixes it expects a lone space in their place, which its tokenizer never writes there.

    Over the tokens that occur: labels, context, and what the teacher expects.
    """
    whole = read_by_smollm2("gpt_neox", smollm2, folder)
    used = torch.unique(torch.cat([
        whole.labels, whole.context.flatten(), whole.known.ids.flatten(), whole.known.own_ids
    ]).clamp_min(0))  # fmt: skip
    place = torch.full((len(whole.entries) + 1,), -1).index_put_((used,), torch.arange(len(used)))
    known = whole.known
    _, numbers = torch.unique(known.cells.numbers[used], return_inverse=True)
    first = torch.full((int(numbers.max()) + 1,), len(used)).scatter_reduce_(
        0, numbers, torch.arange(len(used)), "amin"
    )
    small = replace(
        known,
        ids=place[known.ids],
        own_ids=place[known.own_ids],
        cells=Cells.of(first[numbers].numpy()),
    )
    entries = [whole.entries[token] for token in used.tolist()]
    read = Read(entries, small, place[whole.labels], place[whole.context])
    arms = {"plain": small, "prefix": replace(small, cells=None), "cells": small}
    found = {
        arm: np.mean([learn(read, learned, arm, seed) for seed in range(2)], axis=0)
        for arm, learned in arms.items()
    }
    print({arm: values.round(3).tolist() for arm, values in found.items()})
    assert found["cells"][0] < found["prefix"][0] < found["plain"][0]
    assert found["cells"][1] < found["prefix"][1] - 1
    assert found["cells"][2] > found["prefix"][2] + 0.1
    assert found["cells"][3] < 0.02 < found["prefix"][3]
