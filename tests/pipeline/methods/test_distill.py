"""A teacher's distributions, stored or online, as a student learns them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.losses.divergences import distribution_divergences, teacher_entropies
from pipeline.losses.loss_result import LossResult, metric_values
from pipeline.methods.label_distributions import ask_distributions, read_distributions
from pipeline.methods.method import Method
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.streaming import AlignedRows, Reading, Rows
from pipeline.streaming.vocabularies import vocabulary_map
from pipeline.training.command import main
from pipeline.training.config import TrainConfig
from pipeline.training.guided import GuidedStudent
from pipeline.training.loop import train
from schemas.distribution_rule import EntryShape
from schemas.errors import ForeignLossesError
from tests.support import teaching
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model
from tests.support.killing import run_killed
from tests.support.scored_data import SEQ_LENGTH, run_score

TOP_K = 8  # of the fixture


def open_rows(root: Path, **more: Any) -> AlignedRows:
    return teaching.open_rows(root / "data", seq_length=SEQ_LENGTH, **more)


def stored_rows(root: Path) -> AlignedRows:
    return open_rows(root, stored_losses="", with_distributions=True)


def result_of(
    method: Method, root: Path, batch: Rows, asked: EntryShape | None = None
) -> LossResult:
    """Return the loss of a batch by what its rows hold, or a teacher is asked for."""
    student = load_language_model(str(root / "student"))
    teacher = load_language_model(str(root / "teacher")) if asked else None
    tables = vocabulary_map(open_rows(root))
    guided = GuidedStudent(student, method, vocabulary_map=tables, asked=asked)
    return guided(batch, teacher=teacher)


@pytest.mark.parametrize("tokens", ["all", "kept", "dropped"])
def test_a_running_teacher_teaches_what_was_stored_of_it(taught: Path, tokens: Any) -> None:
    """To the rounding of fp16, and of scores that choose tokens."""
    by_row = {} if tokens == "all" else {"scope": "row"}
    method = Method("distill", distill_tokens=tokens, **by_row)
    stored, online = stored_rows(taught), open_rows(taught)
    places = [0, 1, 2, 3]
    one = result_of(method, taught, stored.__getitems__(places))
    batch = online.__getitems__(places)
    two = result_of(method, taught, batch, EntryShape(TOP_K + 1))
    found, expected = metric_values(one.metrics), metric_values(two.metrics)
    # A label at the threshold may change sides.
    assert found == pytest.approx(expected, rel=5e-3 if tokens == "all" else 3e-2, abs=1e-4)
    assert one.loss_sum.item() == pytest.approx(two.loss_sum.item(), rel=1e-3)
    assert one.num_tokens == two.num_tokens
    assert found["distribution_fraction"] > 0.2
    share = found["taught_fraction"] / found["distribution_fraction"]
    low, high = {"all": (1, 1), "kept": (0.2, 0.6), "dropped": (0.4, 0.8)}[tokens]
    assert low <= share <= high
    assert found["divergence"] > 0
    assert 0 < found["mass_held"] < 1


def test_kept_and_dropped_are_all(taught: Path) -> None:
    batch = stored_rows(taught).__getitems__([0, 1])
    sums = {}
    for tokens in ("all", "kept", "dropped"):
        metrics = result_of(Method("distill", distill_tokens=tokens), taught, batch).metrics
        sums[tokens] = metrics["divergence"]
    torch.testing.assert_close(sums["kept"] + sums["dropped"], sums["all"])


@pytest.mark.parametrize("by", ["student_entropy", "teacher_entropy", "random"])
def test_a_share_of_the_labels_that_have_a_distribution_learns_it(taught: Path, by: Any) -> None:
    """Those of the highest entropy, by whole distributions of the student."""
    batch = stored_rows(taught).__getitems__([0, 1, 2, 3])
    student = load_language_model(str(taught / "student"))
    with torch.no_grad():
        given = batch["input_ids"], batch["position_ids"]
        logits = output_layer(student).logits(
            hidden_states(student, given[0], position_ids=given[1])
        )
    log_probs = logits.log_softmax(-1)
    known_of = read_distributions(batch)
    ids, probs = known_of.ids, known_of.probs
    own = log_probs.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
    divergences = distribution_divergences(own.flatten(0, 1), probs.flatten(0, 1))
    known = (batch["loss_mask"].bool() & (ids[..., 0] >= 0)).flatten()
    entropies = torch.special.entr(log_probs.exp()).sum(-1)
    if by == "teacher_entropy":
        entropies = teacher_entropies(known_of)
    order = entropies.flatten().masked_fill(~known, -1).argsort(descending=True)
    num_kept = int(0.3 * int(known.sum()))
    found = {}
    for tokens in ("kept", "dropped"):
        method = Method(
            "distill",
            distill_map="prefix",
            distill_tokens=tokens,
            distill_by=by,
            keep_fraction=0.3,
        )
        metrics = found[tokens] = result_of(method, taught, batch).metrics
        num_taught = num_kept if tokens == "kept" else int(known.sum()) - num_kept
        assert metrics["taught_fraction"].tolist() == [num_taught, int(batch["loss_mask"].sum())]
    both = found["kept"]["divergence"] + found["dropped"]["divergence"]
    assert both[0].item() == pytest.approx(divergences[known].sum().item(), rel=1e-4)
    best = divergences[order[:num_kept]].sum().item()
    share = found["kept"]["divergence"][0].item()
    if by == "random":
        assert share != pytest.approx(best, rel=1e-4)
        again = result_of(replace(method, distill_tokens="kept", seed=1), taught, batch)
        assert again.metrics["divergence"][0].item() != pytest.approx(share, rel=1e-4)
    else:
        assert share == pytest.approx(best, rel=1e-4)


def test_weight_0_is_plain_training(taught: Path) -> None:
    batch = stored_rows(taught).__getitems__([0, 1])
    plain = result_of(Method("full"), taught, batch)
    none = result_of(Method("distill", weight=0.0), taught, batch)
    assert none.loss_sum.item() == pytest.approx(plain.loss_sum.item(), rel=1e-6)


def config(root: Path, output: Path, **more: Any) -> TrainConfig:
    return TrainConfig(
        data=Reading(str(root / "data")),
        student=str(root / "student"),
        output=output,
        **teaching.with_teaching({
            "seq_length": SEQ_LENGTH, "global_batch_size": 4, "micro_batch_size": 2,
            "num_steps": 4, "warmup_steps": 1, "learning_rate": 1e-3, "method": Method("distill"),
            "stored_losses": ("",), **more,
        }),
    )  # fmt: skip


def test_a_run_by_stored_distributions_learns_them_and_goes_on(
    taught: Path, tmp_path: Path
) -> None:
    """Accumulated or at once, in one go or in two."""
    logs = {}
    runs: dict[str, dict[str, Any]] = {
        "whole": {},
        "accumulated": {"micro_batch_size": 1},
        "halves": {},
    }
    for name, changes in runs.items():
        run = config(taught, tmp_path / name, **changes)
        if name == "halves":
            train(replace(run, exit_after=2))
        train(run)
        lines = (tmp_path / name / "log.jsonl").read_text("utf-8").splitlines()
        logs[name] = [json.loads(line) for line in lines]
        for line in logs[name]:
            del line["seconds"]
    assert logs["halves"] == logs["whole"]
    assert len(logs["whole"]) == 4
    for line in logs["whole"]:
        share = line["taught_fraction"]
        whole = line["student_loss"] + 0.8 * share * (line["divergence"] - line["cell_loss"])
        assert line["loss"] == pytest.approx(whole, rel=1e-5)
    assert logs["accumulated"][0] == pytest.approx(logs["whole"][0], rel=1e-4)


def test_what_can_t_be_learned_is_refused(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--top-k"):
        train(config(world, tmp_path))
    batch = open_rows(world).__getitems__([0])
    with pytest.raises(ValueError, match="rows hold no distributions"):
        result_of(Method("distill"), world, batch)
    with pytest.raises(ValueError, match="top_k=4 is for a running teacher"):
        config(world, tmp_path, top_k=4)
    with pytest.raises(ValueError, match="distill_by=random chooses nothing where all are"):
        Method("distill", distill_by="random")
    with pytest.raises(ValueError, match="method=distill needs a teacher, or stored_losses"):
        config(world, tmp_path, stored_losses=None)


@pytest.fixture(scope="module")
def two_teachers(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same scored by a second teacher, with fewer entries."""
    root = shutil.copytree(taught, tmp_path_factory.mktemp("two") / "world")
    write_model(root / "second", byte_level(480), seed=7)
    run_score(root, "--teacher", str(root / "second"), "--top-k", "4", "--draws", "0")
    return root


@pytest.mark.parametrize(
    ("given", "options", "changes"),
    [
        (
            ("--teacher-weights", "1", "3"),
            {"teacher_weights": (1.0, 3.0)},
            [
                (("--teacher-weights", "3", "1"), "was made with --teacher-weights "),
                (("--stored-losses", "second", "teacher"), "were of another teacher, order or "),
            ],
        ),
        (
            ("--teacher-choice", "likelier"),
            {"teacher_choice": "likelier"},
            [(("--teacher-choice", "mean"), "was made with --teacher-choice ")],
        ),
    ],
    ids=["mean", "likelier"],
)
def test_several_teachers_train_a_student_from_the_command_line(
    two_teachers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: tuple[str, ...],
    options: dict[str, Any],
    changes: list[tuple[tuple[str, ...], str]],
) -> None:
    root, names = two_teachers, ("teacher", "second")
    command = [
        "--data", str(root / "data"), "--student", str(root / "student"), "--output",
        str(tmp_path), "--method", "distill", "--stored-losses", *names, "--seq-length",
        str(SEQ_LENGTH), "--global-batch-size", "4", "--micro-batch-size", "2", "--num-steps", "2",
        "--warmup-steps", "1", *given,
    ]  # fmt: skip
    assert main([*command, "--exit-after", "1"]) == 0
    for change, told in changes:
        assert main([*command, *change]) == 2
        assert told in capsys.readouterr().err
    assert main(command) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    found = {}
    for kind, sources in {"both": names, "teacher": names[:1], "second": names[1:]}.items():
        more = options if kind == "both" else {}
        rows = open_rows(root, stored_losses=sources, with_distributions=True, **more)
        loss = result_of(Method("distill"), root, rows.__getitems__([0, 1, 2, 3]))
        found[kind] = loss.loss_sum.item() / int(loss.num_tokens)
    assert lines[0]["loss"] == pytest.approx(found.pop("both"), rel=1e-4)
    assert all(lines[0]["loss"] != pytest.approx(each, rel=1e-4) for each in found.values())


def test_a_running_teacher_draws_what_was_stored(drawn: Path) -> None:
    stored, online = stored_rows(drawn), open_rows(drawn)
    places, method = [0, 1, 2, 3], Method("distill")
    batch, others = stored.__getitems__(places), online.__getitems__(places)
    assert batch.layout.entries == EntryShape(5, 3)
    one = result_of(method, drawn, batch)
    two = result_of(method, drawn, others, EntryShape(5, 3))
    assert metric_values(one.metrics) == pytest.approx(metric_values(two.metrics), rel=2e-3)
    assert one.loss_sum.item() == pytest.approx(two.loss_sum.item(), rel=1e-4)
    teacher = load_language_model(str(drawn / "teacher"))
    with torch.no_grad():
        places_of = others["teacher_position_ids"]
        states = hidden_states(teacher, others["teacher_input_ids"], position_ids=places_of)
    tables, asked = vocabulary_map(online), EntryShape(5, 3)
    found = ask_distributions(states, output_layer(teacher), others, tables, asked)
    known = (batch["next_token_ids"][..., :1] >= 0).expand(-1, -1, 3)
    same = found.ids[..., -3:] == batch["next_token_ids"][..., -3:]
    assert int(known.sum()) > 300
    assert same[known].double().mean() > 0.999
    mass = batch["next_token_probs"].sum(-1)[known[..., 0]]
    assert mass.max() <= 1 + 1e-5
    assert mass.median() > 0.9, "what the student's tokens can't spell is missing"


@pytest.mark.slow
def test_a_run_by_draws_that_is_killed_goes_on(drawn: Path, tmp_path: Path) -> None:
    logs = []
    for name in ("whole", "killed"):
        command = [
            *("--data", str(drawn / "data"), "--student", str(drawn / "student")),
            *("--output", str(tmp_path / name), "--method", "distill", "--stored-losses", ""),
            *("--distill-tokens", "kept", "--distill-by", "student_entropy"),
            *("--seq-length", str(SEQ_LENGTH), "--global-batch-size", "4"),
            *("--micro-batch-size", "2", "--num-steps", "4", "--warmup-steps", "1"),
            *("--checkpoint-every", "1", "--learning-rate", "1e-3"),
        ]
        if name == "killed":
            steps = ["pipeline.training.loop.train_step"]
            run_killed("pipeline.training.command", command, steps, call=3)
            assert (tmp_path / name / "checkpoint.pt").exists()
        assert main(command) == 0
        lines = (tmp_path / name / "log.jsonl").read_text("utf-8").splitlines()
        logs.append([json.loads(line) | {"seconds": 0} for line in lines])
    assert [line["step"] for line in logs[1]] == [1, 2, 3, 4]
    assert logs[0] == logs[1]
    weights = [
        load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "killed")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_draws_train_and_what_they_can_t_do_is_refused(
    drawn: Path, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.models.running_teacher.require_trained", lambda *_, **__: None)
    run = config(drawn, tmp_path / "stored", num_steps=2)
    train(run)
    line = json.loads((run.output / "log.jsonl").read_text("utf-8").splitlines()[0])
    assert line["loss"] > line["divergence"] + 1, "cross entropy is learned, and the KL reported"
    online = {"stored_losses": None, "teacher": str(drawn / "teacher"), "top_k": 4}
    train(config(drawn, tmp_path / "online", num_steps=2, draws=3, **online))
    again = (tmp_path / "online" / "log.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(again)["loss"] == pytest.approx(line["loss"], rel=1e-4)
    for draws, found in ((None, 4), (0, 0)):
        other = config(drawn, tmp_path / "online", num_steps=2, draws=draws, **online)
        with pytest.raises(ValueError, match=f"made with draws=3, this run has {found}"):
            train(other)
    for method in (Method("distill", temperature=2.0), Method("distill", reverse_kl=True)):
        for more in ({}, {**online, "draws": 3}):
            with pytest.raises(ValueError, match="needs a teacher without draws: draws are right"):
                train(config(drawn, tmp_path / "refused", method=method, **more))
    with pytest.raises(ValueError, match="draws=3 is for a running teacher"):
        config(drawn, tmp_path, draws=3)
    with pytest.raises(ValueError, match=r"draws=300 must lie in 1\.\.250"):
        config(drawn, tmp_path, draws=300, **online)
    with pytest.raises(ValueError, match="draws=3 is for methods that learn next tokens"):
        config(drawn, tmp_path, draws=3, **online | {"top_k": None}, method=Method("teacher"))
    both = shutil.copytree(drawn, tmp_path / "both", ignore=shutil.ignore_patterns("plans"))
    for path in (taught / "data").glob("*teacher-*"):
        shutil.copy(path, both / "data")
    names = tuple(path.stem.split("-")[1] for path in (both / "data").glob("teacher-*.json"))
    for choice in ("mean", "likelier"):
        with pytest.raises(ForeignLossesError, match="4 and 3 and 8 and 0"):
            train(config(both, tmp_path / "x", stored_losses=names, teacher_choice=choice))


def masses(batch: Rows, entries: slice) -> torch.Tensor:
    """Return the mass of every student token by some columns, [rows, seq_length, V]."""
    ids, probs = batch["next_token_ids"][..., entries].long(), batch["next_token_probs"]
    found = torch.zeros(*ids.shape[:2], 1000)
    return found.scatter_add_(-1, ids + 1, probs[..., entries])[..., 1:]


def test_a_mean_with_draws_is_the_mean_of_what_each_teacher_says(
    drawn: Path, tmp_path: Path
) -> None:
    """So it is right on average as each is; all of it, entries and draws apart."""
    root, names = shutil.copytree(drawn, tmp_path / "world"), ("teacher", "second")
    write_model(root / "second", byte_level(480), seed=7)
    more = ("--top-k", "4", "--draws", "3", "--top-log-probs", "float16")
    run_score(root, "--teacher", str(root / "second"), *more)

    def read(*names: str, **more: Any) -> Rows:
        rows = open_rows(root, stored_losses=names, with_distributions=True, **more)
        return rows.__getitems__([0, 1, 2, 3])

    each, both = [read(name) for name in names], read(*names, teacher_weights=(1.0, 3.0))
    assert both.layout.entries == EntryShape(2 * 5, 2 * 3)
    known = torch.stack([batch["next_token_ids"][..., 0] >= 0 for batch in each]).all(0)
    assert int(known.sum()) > 100
    for batch in each:
        assert not torch.equal(batch["teacher_losses"], both["teacher_losses"])
    for of_each, of_both in ((slice(5), slice(10)), (slice(5, None), slice(10, None))):
        one, other = (masses(batch, of_each) for batch in each)
        expected = torch.where(known.unsqueeze(-1), 0.25 * one + 0.75 * other, 0.0)
        torch.testing.assert_close(masses(both, of_both), expected, rtol=1e-5, atol=1e-7)
        assert float(expected.sum()) > 10
    for batch in each:
        own = batch["own_token_ids"].where(known, -1)
        assert torch.equal(both["own_token_ids"], own)
    assert (both["next_token_ids"][~known] == -1).all()
    run = config(root, tmp_path / "run", stored_losses=names, num_steps=2)
    train(run)
    line = json.loads((run.output / "log.jsonl").read_text("utf-8").splitlines()[0])
    assert line["taught_fraction"] > 0.2
