"""Entries and draws together are the teacher's distribution on average, mapped or not."""

import numpy as np
import pytest
import torch

from pipeline.distributions.kernels import Entries
from pipeline.distributions.mapping import give_masses, map_batch
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.distributions.walk import RowFields
from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.divergences import LabelDistributions, distilled_loss
from pipeline.losses.likeliest import score_with_likeliest
from pipeline.losses.logits import OutputLayer
from pipeline.losses.tail import TailDraws, draw_keys
from schemas.distribution_rule import EntryShape
from tests.pipeline.distributions.test_mapping import ENDED, one_row
from tests.support.mapped_distributions import ByteTokenizer, naive_boundary, naive_inside

TEXT, TOP, DRAWS, SEEDS = b"abcabbcaabcbcab", 2, 2, 20_000
TEACHER = [b"", b"a", b"b", b"c", b"bc", b"aab", b"ca", b"cab", b"abca", b"bca", b"cc", b"abb"]
STUDENT = [b"", b"a", b"b", b"c", b"ab", b"bcb", b"caa", b"cc"]
SHAPE = EntryShape(TOP + 1, DRAWS)


@pytest.fixture(scope="module")
def said():
    """A teacher's distributions, and what it says of them by many seeds."""
    given = np.array([0, *ByteTokenizer(TEACHER, 0).segment(TEXT)], np.int32)
    probs = np.random.default_rng(0).dirichlet(np.ones(12), len(given))
    return probs, drawn_entries(given, probs)


@pytest.fixture(scope="module", params=[STUDENT, TEACHER], ids=["two vocabularies", "one"])
def mapped(request, said):
    """A student's vocabulary, its row, the teacher's distributions, and its entries of them."""
    student, (probs, (losses, ids, log_probs)) = request.param, said
    s_tok, t_tok = ByteTokenizer(student, 0), ByteTokenizer(TEACHER, 0)
    tables = VocabularyMap.of(s_tok, t_tok, student_convention=ENDED, teacher_convention=ENDED)
    row = one_row(s_tok.segment(TEXT), t_tok.segment(TEXT), student, TEACHER)
    batch = {name: np.stack([values] * SEEDS) for name, values in row.items()}
    found = map_batch(batch, ids, log_probs, tables, losses, exact=SHAPE.exact)
    return student, row, probs, found


def drawn_entries(given, probs):
    """Return what a teacher says of tokens by many seeds: losses, ids and log-probabilities."""
    places, layer = len(given), OutputLayer(torch.from_numpy(np.log(probs).T.copy()))
    states = torch.eye(places, dtype=torch.float64).repeat(SEEDS, 1)
    labels = torch.from_numpy(np.append(given[1:], -1)).long().repeat(SEEDS)
    keys = np.concatenate([draw_keys(given, seed) for seed in range(SEEDS)])
    tail = TailDraws(torch.from_numpy(keys), DRAWS)
    ahead, ids, log_probs = score_with_likeliest(states, layer, labels, TOP, tail=tail)
    losses = torch.cat([torch.tensor([torch.nan]), ahead[: places - 1]]).float()
    ids, log_probs = tail.behind(ids, log_probs)
    shape = SEEDS, places, -1
    return losses.expand(SEEDS, -1).numpy(), *(
        each.view(shape).numpy() for each in (ids.int(), log_probs.float())
    )


def expected_distributions(student, teacher, row, probs):
    """Return mass by student id for each label: of the whole teacher, or inside of what is exact.

    None where it says nothing; and how many labels are at a boundary.
    """
    s_ids, t_ids = row["input_ids"][1:-1].tolist(), row["teacher_input_ids"][1:].tolist()
    starts = np.cumsum([0, *(len(teacher[i]) for i in t_ids)]).tolist()
    everything, byte, found, num_boundaries = np.arange(len(teacher)), 0, [], 0
    for label in (*s_ids, None):
        token = int(np.searchsorted(starts, byte, side="right")) - 1
        prefix, own = TEXT[starts[token] : byte], probs[token]
        if prefix:
            exact = {*np.argsort(-own)[:TOP].tolist(), t_ids[token]}
            known = np.array(sorted(exact))
            found.append(naive_inside(student, teacher, prefix, known, own[known]))
        else:
            found.append(naive_boundary(student, teacher, ({0}, 0), everything, own))
            num_boundaries += 1
        byte += 0 if label is None else len(student[label])
    return found, num_boundaries


CELLS = {"each alone": None, "in cells": [0, 1, 2, 3, 1, 2, 3, 3, 8, 9, 10, 11]}


@pytest.mark.parametrize("cells", CELLS.values(), ids=CELLS)
def test_the_gradient_is_right_on_average(mapped, cells):
    """Of a student's whole output layer, over many seeds; that of the likeliest alone is not."""
    student, row, probs, found = mapped
    to, masses, own_ids = map(torch.from_numpy, found)
    numbers = np.arange(len(student)) if cells is None else np.array(cells[: len(student)])
    known = LabelDistributions(to.long(), masses, own_ids.long(), SHAPE, Cells.of(numbers))

    torch.manual_seed(0)
    places, mask = len(row["input_ids"]), torch.from_numpy(row["loss_mask"])
    labels = torch.from_numpy(np.append(row["input_ids"][1:], 0)).long()
    weight = torch.randn(len(student), places, dtype=torch.float64, requires_grad=True)
    every = labels.expand(SEEDS, -1)
    scores = linear_cross_entropy(
        torch.eye(places, dtype=torch.float64).expand(SEEDS, -1, -1),
        weight,
        every,
        entry_ids=known.asked_of(every),
        cells=known.cells,
    )
    masks = mask.expand(SEEDS, -1)
    loss = distilled_loss(scores, known, every, loss_mask=masks, weight=0.75).loss_sum
    (given,) = torch.autograd.grad(loss / SEEDS, weight)

    whole, num_boundaries = expected_distributions(student, TEACHER, row, probs)
    q = weight.T.softmax(-1)
    of_cell = torch.stack([q[:, numbers == number].sum(-1) for number in numbers], -1).log()
    wanted, num_crossing = torch.zeros((), dtype=torch.float64), 0
    for place, masses_of in enumerate(whole):
        label = int(labels[place])
        crossing = numbers[int(own_ids[0, place])] != numbers[label]
        num_crossing += crossing and bool(masses_of)
        wanted = wanted - q[place, label].log()
        if masses_of and not crossing:
            learned = sum(mass * of_cell[place, token] for token, mass in masses_of.items())
            wanted = wanted - 0.75 * (learned - of_cell[place, label])
    (expected,) = torch.autograd.grad(wanted, weight)
    assert num_boundaries >= 4
    assert (student is TEACHER) == (num_boundaries == places - 1)
    assert (num_crossing > 0) == (cells is None and student is STUDENT)
    assert float((given - expected).abs().max()) < 0.01
    alone = masses[0, :, : SHAPE.exact].sum(-1)
    assert float((1 - alone[: places - 1]).max()) > 0.2, "what the draws stand for isn't little"


def test_draws_share_what_is_left():
    """The text's own token has its mass unless it is an entry; rounded entries may hold all."""
    losses = np.array([np.nan, 2.0, 1.0, 3.0, np.nan], np.float32)
    empty = np.empty(0, np.int32)
    row = RowFields(empty, empty, empty, empty, empty, empty, losses)._replace(
        teacher_input_ids=np.array([9, 5, 6, 7, 8], np.int32),
        teacher_cu_seqlens=np.array([0, 4, 5, 5], np.int32),
    )
    ids = np.full((5, 5), -1, np.int32)
    probs = np.zeros((5, 5), np.float32)
    ids[:, 3:] = [20, 21]
    for place, own in enumerate([{4: 0.5, 3: 0.25}, {6: 0.4}, {1: 0.9, 2: 0.2}, {7: 0.5}, {}]):
        ids[place, : len(own)] = list(own)
        probs[place, : len(own)] = list(own.values())
    give_masses(row, Entries(ids, probs, 3))
    # Another own token behind two entries; an entry that is the own; too much; no own token.
    assert ids[:, :3].tolist() == [[4, 3, 5], [6, -1, -1], [1, 2, 7], [7, -1, -1], [-1, -1, -1]]
    assert probs[0] == pytest.approx([0.5, 0.25, np.exp(-2), *[(0.25 - np.exp(-2)) / 2] * 2])
    assert probs[1] == pytest.approx([0.4, 0, 0, 0.3, 0.3])
    assert probs[2] == pytest.approx([0.9, 0.2, np.exp(-3), 0, 0])
    assert probs[3] == pytest.approx([0.5, 0, 0, 0.25, 0.25])
    assert not probs[4].any()
