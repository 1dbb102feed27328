"""Several teachers read as one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.scoring.stored_teachers import StoredTeachers
from pipeline.scoring.teaching import Teaching
from schemas.distribution_rule import DistributionRule, EntryShape
from schemas.errors import ForeignLossesError
from schemas.sidecar import TeacherRule
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model
from tests.support.scored_data import SEQ_LENGTH, run_score
from tests.support.teaching import open_rows

LENGTH = 7


class Part:
    """A teacher's stored losses of any document, drawn by a seed."""

    def __init__(self, seed, top_k):
        rng = np.random.default_rng(seed)
        rule = TeacherRule(f"{seed:064d}", "float32", "0" * 64, {})
        stored = DistributionRule(top_k, 1.0, 9, "float16")
        self.rule = replace(rule, distributions=stored)
        self.losses = rng.random((3, LENGTH)).astype(np.float16)
        self.ids = np.array([rng.permutation(9)[:top_k] for _ in range(LENGTH + 1)], np.int32)
        masses = -np.sort(-rng.dirichlet(np.ones(top_k + 1), LENGTH + 1))[:, :top_k]
        self.ids[2, 1:], masses[2, 1:] = -1, 0
        self.masses = masses

    def mean_loss(self, document):
        return float(self.losses[document].mean(dtype=np.float64))

    def read(self, document, start, stop):
        return self.losses[document, start:stop]

    def read_entries(self, document, start, *, ids, log_probs):
        stop = start + len(ids)
        ids.fill(-1)
        log_probs.fill(-np.inf)
        ids[:, : self.ids.shape[1]] = self.ids[start:stop]
        with np.errstate(divide="ignore"):
            log_probs[:, : self.ids.shape[1]] = np.log(self.masses[start:stop])


@pytest.fixture
def parts():
    return Part(1, 3), Part(2, 5)


def read_all(losses, document=0):
    ids, log_probs = np.empty((LENGTH + 1, 5), np.int32), np.empty((LENGTH + 1, 5), np.float32)
    losses.read_entries(document, 0, ids=ids, log_probs=log_probs)
    return ids, np.exp(log_probs)


def test_a_mean_adds_losses_up_and_keeps_what_each_expects_apart(parts):
    losses = StoredTeachers(parts, (0.3, 0.7))
    expected = 0.3 * parts[0].losses[1, 2:5].astype(float) + 0.7 * parts[1].losses[1, 2:5]
    assert losses.read(1, 2, 5) == pytest.approx(expected, rel=1e-3)
    for part, apart in zip(parts, losses.apart, strict=True):
        ids, masses = read_all(apart)
        width = part.ids.shape[1]
        assert np.array_equal(ids[:, :width], part.ids)
        assert masses[:, :width] == pytest.approx(part.masses, rel=1e-5)


def test_each_document_has_the_teacher_that_finds_it_likelier(parts):
    losses = StoredTeachers(parts, ())
    for document in range(3):
        best = min(parts, key=lambda part: part.losses[document].astype(float).sum())
        assert np.array_equal(losses.read(document, 0, LENGTH), best.losses[document])
        ids, _ = read_all(losses, document)
        assert np.array_equal(ids[:, : best.ids.shape[1]], best.ids)
        assert (ids[:, best.ids.shape[1] :] == -1).all()


def test_a_row_has_room_for_all_that_a_mean_says(parts):
    """With a place for the text's own token of each."""
    assert StoredTeachers(parts, (0.5, 0.5)).rule.shape == EntryShape(4 + 6)
    assert StoredTeachers(parts, ()).rule.shape == EntryShape(6)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ((1.0,), {}, "1.0 must be one positive number for each of the 2 "),
        ((1.0, 2.0), {"stored_losses": "a"}, "2.0 must be one positive number for each of the 1 "),
        ((1.0, 0.0), {}, "one positive number"),
        ((1.0, -2.0), {}, "one positive number"),
        ((1.0, float("nan")), {}, "one positive number"),
        ((1e308, 1e308), {}, "add up to more than"),
        ((1.0, 2.0), {"teacher_choice": "likelier"}, "are for a mean"),
        ((1.0,), {"stored_losses": None}, "none are given"),
    ],
)
def test_impossible_weights_are_refused(weights, options, message):
    with pytest.raises(ValueError, match=f"teacher_weights.*{message}"):
        Teaching(**{"stored_losses": ("a", "b"), "teacher_weights": weights, **options})


def test_paths_are_names_and_an_unknown_choice_is_refused():
    """The choice was a mean, without a word, and a path a TypeError."""
    assert Teaching(stored_losses=Path("a")).names == ("a",)
    assert Teaching(stored_losses=[Path("a"), "b"]).names == ("a", "b")
    assert Teaching(teacher=Path("a")) == Teaching(teacher="a")
    with pytest.raises(ValueError, match="teacher_choice=any: choose one of mean, likelier"):
        Teaching(stored_losses=("a", "b"), teacher_choice="any")


def test_rows_hold_two_teachers_means(copied):
    write_model(copied / "second", byte_level(480), seed=7)
    run_score(copied, "--teacher", str(copied / "second"))

    def read(*names, **options):
        given = {"seq_length": SEQ_LENGTH, "stored_losses": names, **options}
        rows = open_rows(copied / "data", **given)
        return rows, rows.__getitems__(range(len(rows)))["teacher_losses"].nan_to_num(-1)

    names = "teacher", "second"
    alone = [read(name)[1] for name in names]
    rows, both = read(*names, teacher_weights=(1.0, 3.0))
    assert torch.allclose(both, 0.25 * alone[0] + 0.75 * alone[1], atol=1e-2)
    _, likelier = read(*names, teacher_choice="likelier")
    assert ((likelier == alone[0]) | (likelier == alone[1])).all()
    assert not torch.equal(*alone)
    fingerprints = {rows.teachers_rule.fingerprint, read(names[0])[0].teachers_rule.fingerprint}
    fingerprints.add(read(*names, teacher_weights=(3.0, 1.0))[0].teachers_rule.fingerprint)
    assert len(fingerprints) == 3
    with pytest.raises(ForeignLossesError, match="name one teacher's scores twice"):
        read(names[0], names[0])


def test_a_label_of_which_one_teacher_says_nothing_has_no_mean(copied):
    """Its share of the mass could be anywhere; everywhere else the mean is the sum."""
    write_model(copied / "second", byte_level(480), seed=7)
    run_score(copied, "--top-k", "3", "--draws", "0")
    stored = ("--top-k", "4", "--draws", "0", "--entropy-above", "3.85")
    run_score(copied, "--teacher", str(copied / "second"), *stored)

    def read(*names, **options):
        given = {"seq_length": SEQ_LENGTH, "stored_losses": names, **options}
        rows = open_rows(copied / "data", with_distributions=True, **given)
        batch = rows.__getitems__(range(len(rows)))
        ids, probs = batch["next_token_ids"].long(), batch["next_token_probs"].double()
        whole = torch.zeros((*ids.shape[:2], 481), dtype=torch.float64)
        return ids[..., 0] >= 0, whole.scatter_add_(2, ids.where(ids >= 0, 480), probs)

    (known, first), (some, second) = read("teacher"), read("second")
    both, mean = read("teacher", "second", teacher_weights=(1.0, 3.0))
    assert torch.equal(both, known & some)
    assert 0.1 < float((known & ~some).sum() / known.sum()) < 0.9
    assert mean[~both].sum() == 0
    torch.testing.assert_close(mean[both], (first + 3 * second)[both] / 4, rtol=1e-5, atol=1e-7)
