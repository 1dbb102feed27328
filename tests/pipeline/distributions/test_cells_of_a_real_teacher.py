"""A real teacher's mass in cells, by groups of tokens, and what a small student makes of it."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from beam_jobs.score.command import main as score
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import open_dataset
from pipeline.distributions.cells import count_cells
from pipeline.distributions.sample import sample_documents
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.divergences import LabelDistributions, distilled_loss
from pipeline.methods.label_distributions import read_distributions
from pipeline.tokenization import load_tokenizer
from tests.pipeline.distributions.test_cells import SHARED, real_texts
from tests.support.datasets import build_dataset
from tests.support.teaching import open_rows

GROUPS = {
    "numbers": rb" ?[0-9]{2,}",
    "one digit": rb" ?[0-9]",
    "lone space": rb" ",
    "line breaks": rb"[ ]*\n+",
    "indents": rb"[ ]{2,}",
    "words": rb" ?[A-Za-z]{2,}",
}


LEAST_RULED_OUT = {"gpt_neox": 0.01, "falcon": 0.01, "qwen2_5": 0.01}
"""Share of the mass that a label's start rules out, at least."""

STUDENTS = ["gpt_neox", "gemma3", "qwen2_5", "llama2", "falcon", "mistral", "phi3_mini"]

real = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/tokenizers")


@pytest.fixture(scope="module")
def written(smollm2):
    """Texts that SmolLM2 goes on with as it likes: what it expects there is right on average."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    texts = [*real_texts()[:150:6], *real_texts()[150:] * 2]
    starts = [tokenizer(text[:500])["input_ids"][:24] for text in texts]
    ids = torch.tensor([start for start in starts if len(start) == 24])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        max_new_tokens=160,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.batch_decode(found, skip_special_tokens=True)


def score_by(smollm2, folder, name, texts, *more):
    """Align texts with a student's tokenizer, and store what SmolLM2 says of them."""
    student, teacher = load_tokenizer(str(SHARED / name)), load_tokenizer(str(smollm2))
    named = [(f"d{number}", text) for number, text in enumerate(texts)]
    build_dataset(folder, named, student=student, teacher=teacher)
    rows = ["--seq-length", "512", "--dtype", "float32"]
    stored = ["--top-k", "13", "--draws", "4", *more]
    assert score([str(folder), "--teacher", str(smollm2), *rows, *stored]) == 0


@pytest.fixture(scope="module")
def scored(written, smollm2, tmp_path_factory):
    """Datasets of one text for many students: the first is scored, the others take it over."""
    folder, reuse = tmp_path_factory.mktemp("scored"), []
    for name in STUDENTS:
        score_by(smollm2, folder / name, name, written, *reuse)
        reuse = ["--reuse", str(folder / STUDENTS[0])]
    return folder


def many_texts():
    """Enough for cells of numbers: of each pair of tokens two are needed."""
    lines = (SHARED.parent / "data/benchmarks/gsm8k_train.jsonl").read_text("utf-8").splitlines()
    math = [json.loads(line) for line in lines[:2000]]
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:100]
    texts = [f"{each['question']}\n{each['answer']}" for each in math]
    return [*texts, *(path.read_text("utf-8", "replace")[:20_000] for path in files)]


def cells_of(folder, student, teacher, texts):
    """Return the cells that a dataset of many texts would have."""
    named = [(f"d{number}", text) for number, text in enumerate(texts)]
    build_dataset(folder, named, student=student, teacher=teacher)
    tables = VocabularyMap.of(student, teacher)
    return count_cells(sample_documents([select_documents(open_dataset(folder))]), tables)


@dataclass(frozen=True)
class Read:
    """What a real teacher says of a text, and the student's four tokens before each label."""

    entries: list[bytes]
    known: LabelDistributions
    labels: torch.Tensor
    context: torch.Tensor
    ruled_out: float


def read(folder, student, tables):
    """Read every label of a dataset that has a distribution."""
    rows = open_rows(folder, seq_length=512, stored_losses="", with_distributions=True)
    batch = rows.__getitems__(list(range(len(rows))))
    found, labels = read_distributions(batch), batch["labels"].long()
    window = torch.nn.functional.pad(batch["input_ids"].long(), (3, 0)).unfold(1, 4, 1)
    kept = (batch["loss_mask"] > 0) & found.is_known
    known = replace(
        found, ids=found.ids[kept], probs=found.probs[kept], own_ids=found.own_ids[kept]
    )
    in_cells = known.in_cells(Cells.of(*tables), window[kept][:, -1])
    moved = known.probs[in_cells.ids != known.ids].sum() / known.probs.sum()
    entries = [student.token_bytes(token) for token in range(student.vocab_size)]
    return Read(entries, in_cells, labels[kept], window[kept], float(moved))


def of_group(entries, group):
    """Return which tokens are of a group, bool [V]."""
    return torch.tensor([re.fullmatch(GROUPS[group], entry) is not None for entry in entries])


@real
@pytest.mark.chain
@pytest.mark.parametrize("name", STUDENTS)
def test_a_real_teacher_expects_what_the_student_s_tokenizer_writes(
    name, scored, smollm2, written, tmp_path
):
    """A group's mass is its labels', of the pairs that pack numbers and line breaks, too."""
    student, teacher = load_tokenizer(str(SHARED / name)), load_tokenizer(str(smollm2))
    cells = cells_of(tmp_path / "many", student, teacher, [*written, *many_texts()])
    found = read(scored / name, student, cells)
    ratios = ratios_of(found)
    print(name, len(found.labels), {g: [round(v, 3) for v in of] for g, of in ratios.items()})
    assert len(ratios) >= 4
    assert len(found.labels) > 6_000
    for ratio, deviation, _ in ratios.values():
        assert abs(ratio - 1) < max(0.05, 3 * deviation), ratios
    assert found.ruled_out > LEAST_RULED_OUT.get(name, 0)


def ratios_of(found):
    """Return a group's mass by its labels, the deviation of that, and how many labels it has.

    Of groups with a hundred labels. A cell's mass is divided among its tokens as the text does.
    """
    numbers, labels, known = found.known.cells.numbers, found.labels, found.known
    seen = torch.bincount(labels, minlength=len(numbers)).double()
    of_cell = torch.zeros_like(seen).index_add_(0, numbers, seen)
    size = torch.bincount(numbers, minlength=len(numbers)).double()
    # Of a cell that the text has nothing of, each token gets as much.
    shares = torch.where(of_cell[numbers] > 0, seen / of_cell[numbers], 1 / size[numbers])
    given, probs, ratios = known.numbers_of(known.ids), known.probs.double(), {}
    for group in GROUPS:
        chosen = of_group(found.entries, group)
        share = torch.zeros_like(seen).index_add_(0, numbers, shares * chosen)
        mass = torch.where(given >= 0, probs * share[given], 0.0).sum(1)
        if (count := float(chosen[labels].sum())) >= 100:
            deviation = float((mass * (1 - mass)).clamp_min(0).sum().sqrt()) / count
            ratios[group] = (float(mass.sum()) / count, deviation, count)
    return ratios


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
@pytest.mark.chain
def test_a_small_student_that_packs_numbers_learns_them(smollm2, tmp_path):
    """By prefixes it expects a lone space in their place, which its tokenizer never writes there.

    Over the tokens that occur: labels, context, and what the teacher expects.
    """
    texts = [text[:3000] for text in real_texts()]
    score_by(smollm2, tmp_path / "data", "gpt_neox", texts)
    student, teacher = load_tokenizer(str(SHARED / "gpt_neox")), load_tokenizer(str(smollm2))
    cells = cells_of(tmp_path / "many", student, teacher, [*texts, *many_texts()])
    whole = read(tmp_path / "data", student, cells)
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
    found = Read(entries, small, place[whole.labels], place[whole.context], 0.0)
    arms = {"plain": small, "prefix": replace(small, cells=None), "cells": small}
    results = {
        arm: np.mean([learn(found, learned, arm, seed) for seed in range(2)], axis=0)
        for arm, learned in arms.items()
    }
    print({arm: values.round(3).tolist() for arm, values in results.items()})
    assert results["cells"][0] < results["prefix"][0] < results["plain"][0]
    assert results["cells"][1] < results["prefix"][1] - 1
    assert results["cells"][2] > results["prefix"][2] + 0.1
    assert results["cells"][3] < 0.02 < results["prefix"][3]
