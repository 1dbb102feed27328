"""Each method's loss against a slow count over documents."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pipeline.methods import METHODS
from pipeline.methods.hf_pass import compute_teacher_losses, mean_teacher_loss
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import Reading
from pipeline.streaming.vocabularies import vocabulary_map
from pipeline.training.loop import train
from tests.support.datasets import (
    build_dataset,
    make_texts,
    read_documents,
)
from tests.support.training_runs import loss_of, pair_config, rows_of, token_losses


@pytest.mark.parametrize("keep_fraction", [None, 0.4])
def test_alm_adds_divergences_to_kept_tokens(
    lab: Path, student: PreTrainedModel, teacher: PreTrainedModel, keep_fraction: float | None
) -> None:
    batch = rows_of(lab / "pair").__getitems__([0, 1])
    result = loss_of(
        Method("alm", keep_fraction=keep_fraction, weight=2.0), student, teacher, batch
    )
    chosen = Method("teacher", keep_fraction=keep_fraction or 0.0)
    selected = loss_of(chosen, student, teacher, batch)
    divergence, count = result.metrics["divergence"].tolist()
    assert divergence > 1
    assert count == float(result.num_tokens) == float(batch["loss_mask"].sum())
    expected = float(selected.loss_sum.detach()) + 2.0 * divergence
    assert float(result.loss_sum.detach()) == pytest.approx(expected, rel=1e-5)
    kept = result.metrics["kept_fraction"].tolist()
    assert kept == selected.metrics["kept_fraction"].tolist()
    assert (kept[0] > 0.3 * kept[1]) == (keep_fraction is not None)


def test_guided_loss_equals_a_slow_count_over_documents(
    lab: Path, student: PreTrainedModel, teacher: PreTrainedModel
) -> None:
    """Score each document alone with the models' own logits, choose by sorting."""
    rows = rows_of(lab / "pair", 512)
    batch = rows.__getitems__(list(range(len(rows))))
    documents = list(read_documents(lab / "pair").values())
    assert len(documents) == 40
    found: list[tuple[float, list[float]]] = []
    for document in documents:
        of_student = token_losses(student, document, "student", rows)
        of_teacher = token_losses(teacher, document, "teacher", rows)
        for token, (start, end) in enumerate(document.teacher_spans.tolist()):
            if start < end:
                found.append((of_student[token], of_teacher[start:end]))
    aggregations: dict[Any, Any] = {"mean": lambda x: sum(x) / len(x), "max": max, "sum": sum}
    for how, phi in aggregations.items():
        method = Method("teacher", unmapped="exclude", aggregation=how)
        result = loss_of(method, student, teacher, batch)
        ranked = sorted(((own - phi(others), own) for own, others in found), reverse=True)
        kept = [loss for _, loss in ranked[: int(0.4 * len(ranked))]]
        assert int(result.num_tokens) == len(kept)
        assert result.loss_sum.item() == pytest.approx(sum(kept), rel=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_loss_to_learn_from(
    lab: Path, student: PreTrainedModel, teacher: PreTrainedModel, name: str
) -> None:
    kind = METHODS[name]
    data, start = ("same", "teacher_start") if kind.one_vocabulary else ("pair", "student")
    learner = load_language_model(str(lab / start))
    rows = rows_of(lab / data)
    more = {"vocabulary_map": vocabulary_map(rows)} if kind.needs == "distributions" else {}
    batch = rows.__getitems__([0, 1])
    method = Method(name, num_chunks=4) if name.startswith("chunks") else Method(name)
    result = loss_of(method, learner, teacher, batch, **more)
    result.loss_sum.backward()  # type: ignore[no-untyped-call]
    assert 0 < float(result.loss_sum.detach()) / float(result.num_tokens) < 12
    assert any(float(p.grad.abs().sum()) for p in learner.parameters() if p.grad is not None)
    kept = result.metrics.get("kept_fraction", torch.ones(2))
    whole = dict.fromkeys(("full", "distill", "kld", "uld"), (1, 1))
    low, high = (whole | {"alm": (0, 0.2)}).get(name, (0.2, 0.7))
    assert low <= float(kept[0] / kept[1]) <= high
    by_teacher = (kind.needs == "losses" and name != "alm") or kind.name.startswith("rho1")
    assert ("teacher_loss" in result.metrics) == by_teacher
    assert ("divergence" in result.metrics) == (name in ("alm", "distill", "kld", "uld"))


@pytest.mark.parametrize("name", ["kld", "uld"])
def test_a_student_that_is_its_teacher_has_no_divergence(
    lab: Path, teacher: PreTrainedModel, name: str
) -> None:
    result = loss_of(
        Method(name), teacher, teacher, rows_of(lab / "same", 256).__getitems__([0, 1])
    )
    assert float(result.metrics["divergence"][0]) == pytest.approx(0, abs=1e-2)
    assert float(result.metrics["student_loss"][0]) > 10


def test_kld_disregards_rows_that_are_no_tokens(lab: Path, tmp_path: Path) -> None:
    """A teacher with more padding than the student, as Llemma's 32,016 rows for 32,000 tokens."""
    teacher = load_language_model(str(lab / "teacher_run" / "model"))
    changes = {"data": Reading(str(lab / "same")), "student": str(lab / "teacher_start")}
    plain = pair_config(lab, tmp_path / "plain", Method("kld"), num_steps=3, **changes)
    teacher.resize_token_embeddings(480 + 16, mean_resizing=False)
    teacher.get_output_embeddings().weight.data[480:] = 0.0  # as likely as many a token
    teacher.save_pretrained(tmp_path / "teacher")
    teaching = Teaching(teacher=str(tmp_path / "teacher"))
    padded = replace(plain, output=tmp_path / "padded", teaching=teaching)
    assert train(padded)["divergence"] == pytest.approx(train(plain)["divergence"], rel=1e-5)


def test_random_choices_differ_between_steps(lab: Path, student: PreTrainedModel) -> None:
    batch = rows_of(lab / "pair", 256).__getitems__([0])
    losses = {
        loss_of(Method("random"), student, None, batch, step).loss_sum.item()
        for step in (0, 0, 1, 2)
    }
    assert len(losses) == 3


def test_a_teachers_mean_loss_leaves_padding_out(tmp_path: Path, teacher: PreTrainedModel) -> None:
    build_dataset(tmp_path / "one", make_texts(1), num_shards=1)
    rows = rows_of(tmp_path / "one", 512)
    batch = rows.__getitems__([0])
    assert batch["loss_mask"].mean() < 0.6
    (document,) = read_documents(tmp_path / "one").values()
    losses = token_losses(teacher, document, "teacher", rows)
    spans = [slice(*span) for span in document.teacher_spans.tolist() if span[0] < span[1]]
    expected = sum(sum(losses[s]) / len(losses[s]) for s in spans) / len(spans)
    assert mean_teacher_loss(teacher, batch) == pytest.approx(expected, rel=1e-4)
    assert int((batch["teacher_position_ids"] > 0).sum()) > 2 * int(batch.teacher_has_loss.sum())
    assert torch.equal(compute_teacher_losses(teacher, batch).isnan(), ~batch.teacher_has_loss)
