"""Students on the same items: a difference is measured item by item."""

import math
import random
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

from pipeline.evaluation.paired_differences import describe_differences, difference
from pipeline.evaluation.results import (
    Results,
    bits_per_byte,
    read_results,
    share_difference,
    student_folders,
)
from pipeline.evaluation.results_page import write_report
from pipeline.evaluation.results_table import describe_results
from pipeline.evaluation.settings import StudentEngine
from tests.pipeline.evaluation.test_measures import measure, state_right, state_wrong
from tests.support.scripted_model import ScriptedModel


def test_students_whose_bars_overlap_may_differ_clearly() -> None:
    """Hard items are hard for both: the one is better by a tenth of a bit on each."""
    chance = random.Random(0)
    ones, others = [], []
    for _ in range(40):
        length, hardness = chance.randint(50, 150), chance.uniform(0.5, 3.0)
        ones.append((-(hardness - 0.1) * length * math.log(2), length))
        others.append((-(hardness + chance.gauss(0, 0.02)) * length * math.log(2), length))
    one, other = bits_per_byte(ones), bits_per_byte(others)
    assert one.high > other.low, "their own intervals overlap"
    samples = [
        [{"place": place, "bits_per_byte": pair} for place, pair in enumerate(pairs)]
        for pairs in (ones, others)
    ]
    made = difference(list(zip(*samples, strict=True)), "bits_per_byte")
    assert made.value == pytest.approx(one.value - other.value)
    assert made.high < -0.08
    assert made.low > -0.12


def test_students_may_count_different_bytes() -> None:
    """As templates of conversations do: one writes thoughts, the other drops them."""
    chance = random.Random(1)
    long = [(-chance.uniform(80, 120), chance.randint(150, 250)) for _ in range(30)]
    short = [(nats / 20, length // 20) for nats, length in long]
    samples = [
        [{"place": place, "bits_per_byte": pair} for place, pair in enumerate(pairs)]
        for pairs in (long, short)
    ]
    made = difference(list(zip(*samples, strict=True)), "bits_per_byte")
    other = difference(list(zip(*reversed(samples), strict=True)), "bits_per_byte")
    assert made.value == pytest.approx(bits_per_byte(long).value - bits_per_byte(short).value)
    assert (other.value, other.low) == pytest.approx((-made.value, -made.high))
    draws = sorted(
        bits_per_byte([a for a, _ in drawn]).value - bits_per_byte([b for _, b in drawn]).value
        for drawn in (
            chance.choices(list(zip(long, short, strict=True)), k=30) for _ in range(2000)
        )
    )
    near = (made.high - made.low) / 8
    assert (made.low, made.high) == pytest.approx((draws[50], draws[-51]), abs=near)


@pytest.mark.parametrize(
    ("gained", "lost", "num", "low", "high"),
    [(0, 0, 20, -0.0891, 0.0891), (4, 0, 20, -0.0023, 0.3660), (30, 10, 100, 0.0791, 0.3131)],
)
def test_a_paired_difference_of_shares(
    gained: int, lost: int, num: int, low: float, high: float
) -> None:
    """Literal rows by Agresti and Min's formula, worked by hand."""
    same = [(1.0, 1.0)] * (num - gained - lost)
    made = share_difference([(1.0, 0.0)] * gained + [(0.0, 1.0)] * lost + same)
    assert made.value == (gained - lost) / num
    assert (made.low, made.high) == pytest.approx((low, high), abs=1e-4)


def test_a_table_is_of_the_items_that_both_answered(tmp_path: Path) -> None:
    measure(ScriptedModel(state_right), tmp_path / "a", ["gsm8k", "svamp"])
    measure(ScriptedModel(state_wrong), tmp_path / "b", ["gsm8k"], limit=2)
    assert student_folders(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    _, heading, columns, row = describe_differences(tmp_path / "a", tmp_path / "b")
    assert heading == "a less b, on the items that both answered:"
    assert columns.split() == ["set", "items", "accuracy", "%", "stated", "%"]
    assert row.split()[:4] == ["GSM8K", "2", "+100.0", "(-19"], "two items are few"
    earlier = tmp_path / "earlier"
    earlier.write_text("a report")
    (tmp_path / "report.html").hardlink_to(earlier)
    page = write_report(tmp_path).read_text("utf-8")
    assert heading in page
    assert earlier.read_text() == "a report", "replaced whole"


def test_students_without_a_common_set_have_no_difference(tmp_path: Path) -> None:
    measure(ScriptedModel(state_right), tmp_path / "a", ["gsm8k"])
    measure(ScriptedModel(state_right), tmp_path / "b", ["svamp"])
    assert describe_differences(tmp_path / "a", tmp_path / "b") == []


def test_other_numbers_of_items_have_their_own_lines(tmp_path: Path) -> None:
    results = Results("a", "a", "0" * 64)
    for kind, limit, batch_size in (("text", 0, 1), ("solution", 0, 1), ("accuracy", 2, 8)):
        engine = StudentEngine(device="cpu", batch_size=batch_size)
        model = ScriptedModel(state_right)
        measure(model, tmp_path, ["gsm8k"], [kind], results=results, engine=engine, limit=limit)
    lines = describe_results(read_results(tmp_path))
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["GSM8K", "3", "–"],
        ["GSM8K", "2", "100.0"],
    ]
    assert "100.0 (34–100)" in lines[2]
    assert [line.rpartition(": ")[2] for line in lines if "batch_size 8" in line] == [
        "GSM8K accuracy"
    ]
